/* A disk whose flush takes FLUSH_US microseconds longer, for whatever is preloaded with it:
   fdatasync, fsync, msync(MS_SYNC), and writes to files opened with O_SYNC or O_DSYNC. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static void flush(void) {
    static long us = -1;
    if (us < 0) us = getenv("FLUSH_US") ? atol(getenv("FLUSH_US")) : 0;
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&left, &left)) {}
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int fdatasync(int fd) { REAL(fdatasync); int r = real(fd); flush(); return r; }
int fsync(int fd) { REAL(fsync); int r = real(fd); flush(); return r; }
int msync(void *at, size_t size, int flags) {
    REAL(msync);
    int r = real(at, size, flags);
    if (flags & MS_SYNC) flush();
    return r;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    ssize_t r = real(fd, data, size, at);
    if (fcntl(fd, F_GETFL) & O_DSYNC) flush();
    return r;
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return pwrite(fd, data, size, at); }
