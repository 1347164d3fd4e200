"""Python imports this first in processes that tests start: it checks what they send (tests/kit/cddl)."""

from tests.kit.cddl import install_in_child

install_in_child()
