"""A stream of the steady exchange: a few numbers, and how it becomes one of h2's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from h2.connection import H2Connection
from h2.stream import H2Stream, StreamInputs


@dataclass(slots=True)
class PlainStream:
    """A stream of the short way; `receiving` and `sending` say which halves are open."""

    window: int
    """What the peer still allows us to send on it."""
    method: str
    announced: int | None = None
    received: int = 0
    consumed: int = 0
    got_headers: bool = False
    sent_headers: bool = False
    receiving: bool = True
    sending: bool = True

    def of_h2(self, number: int, h2: H2Connection, *, client: bool) -> H2Stream:
        """The same as a stream of h2's."""
        made = H2Stream(
            number,
            config=h2.config,
            inbound_window_size=h2.local_settings.initial_window_size,
            outbound_window_size=self.window,
        )
        made.max_outbound_frame_size = h2.max_outbound_frame_size
        window = made._inbound_window_manager
        window.current_window_size -= self.received
        window._bytes_processed = self.consumed
        made.request_method = self.method.encode()
        answers_head = client and self.method == "HEAD"
        made._expected_content_length = 0 if answers_head else self.announced
        made._actual_content_length = self.received
        for step in self._history(client=client):
            made.state_machine.process_input(step)
        return made

    def _history(self, *, client: bool) -> Iterable[StreamInputs]:
        """What h2's machine of a stream has to hear to be where this one is."""
        received = [StreamInputs.RECV_HEADERS] if self.got_headers else []
        received += [] if self.receiving else [StreamInputs.RECV_END_STREAM]
        sent = [StreamInputs.SEND_HEADERS] if self.sent_headers else []
        sent += [] if self.sending else [StreamInputs.SEND_END_STREAM]
        return sent + received if client else received + sent
