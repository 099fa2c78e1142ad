/* Writes down which files below a folder a program and its children open, look at or sync, SQLite's own calls included.
 *
 * LD_PRELOAD=this  FILE_CALLS_BELOW=/folder  FILE_CALLS_LOG=/elsewhere/log
 * One line per call: "open PATH", "stat PATH" or "sync PATH". Relative paths count as elsewhere.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

struct stat;
struct stat64;
struct statx;

static void note(const char *call, const char *path) {
    const char *below = getenv("FILE_CALLS_BELOW"), *log = getenv("FILE_CALLS_LOG");
    char line[5000];
    if (!below || !log || !path || strncmp(path, below, strlen(below)) != 0) return;
    int length = snprintf(line, sizeof line, "%s %s\n", call, path);
    /* Not through open(), which is ours. */
    int fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    if (write(fd, line, (size_t)length) != length) abort();
    close(fd);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MODE(flags) \
    int mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, int); va_end(more); }

int open(const char *path, int flags, ...) { MODE(flags) note("open", path); return NEXT(open)(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) note("open", path); return NEXT(open64)(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags) note("open", path); return NEXT(openat)(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags) note("open", path); return NEXT(openat64)(at, path, flags, mode); }
FILE *fopen(const char *path, const char *how) { note("open", path); return NEXT(fopen)(path, how); }
FILE *fopen64(const char *path, const char *how) { note("open", path); return NEXT(fopen64)(path, how); }
int access(const char *path, int mode) { note("stat", path); return NEXT(access)(path, mode); }

#define STAT(name, kind) \
    int name(const char *path, struct kind *into); \
    int name(const char *path, struct kind *into) { note("stat", path); return NEXT(name)(path, into); }
STAT(stat, stat) STAT(stat64, stat64) STAT(lstat, stat) STAT(lstat64, stat64)

#define STAT_AT(name, kind) \
    int name(int at, const char *path, struct kind *into, int flags); \
    int name(int at, const char *path, struct kind *into, int flags) { note("stat", path); return NEXT(name)(at, path, into, flags); }
STAT_AT(fstatat, stat) STAT_AT(fstatat64, stat64)

/* What programs built for glibc before 2.33 call instead. */
#define XSTAT(name, kind) \
    int name(int version, const char *path, struct kind *into); \
    int name(int version, const char *path, struct kind *into) { note("stat", path); return NEXT(name)(version, path, into); }
XSTAT(__xstat, stat) XSTAT(__xstat64, stat64) XSTAT(__lxstat, stat) XSTAT(__lxstat64, stat64)

int statx(int at, const char *path, int flags, unsigned mask, struct statx *into);
int statx(int at, const char *path, int flags, unsigned mask, struct statx *into) {
    note("stat", path);
    return NEXT(statx)(at, path, flags, mask, into);
}

static void note_sync(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    note("sync", path);
}
int fsync(int fd) { note_sync(fd); return NEXT(fsync)(fd); }
int fdatasync(int fd) { note_sync(fd); return NEXT(fdatasync)(fd); }
