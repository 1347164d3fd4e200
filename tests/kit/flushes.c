/* Counts what makes data durable: fdatasync, fsync, msync(MS_SYNC), and writes to files opened with
   O_SYNC or O_DSYNC.  flushes() tells how many there were. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static int count;

int flushes(void) { return __atomic_load_n(&count, __ATOMIC_SEQ_CST); }

#define FLUSHED() __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST)
#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

int fdatasync(int fd) { REAL(fdatasync); int r = real(fd); FLUSHED(); return r; }
int fsync(int fd) { REAL(fsync); int r = real(fd); FLUSHED(); return r; }
int msync(void *at, size_t size, int flags) {
    REAL(msync);
    int r = real(at, size, flags);
    if (flags & MS_SYNC) FLUSHED();
    return r;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    ssize_t r = real(fd, data, size, at);
    if (fcntl(fd, F_GETFL) & O_DSYNC) FLUSHED();
    return r;
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return pwrite(fd, data, size, at); }
