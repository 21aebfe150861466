// Watches what a process writes below one folder: it counts the steps, kills the process before a chosen one, refuses writes
// as a full disk does, or records every step, so that a power cut can be replayed. Preloaded on Linux by forks.py.
//
// A step is a call that changes the disk: a file or folder is created, written, cut, renamed, linked, deleted or synced.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ({ static typeof(&name) real; if (!real) real = (typeof(&name))dlsym(RTLD_NEXT, #name); real; })

static char root[PATH_MAX];
static size_t root_length;
static int record = -1;
static long kill_at, room = -1;
static long *steps;  // in memory that outlives the process
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

struct step { uint32_t kind, path, other; uint32_t bytes; uint64_t inode; int64_t offset; };

// Watch the folder `folder`. `count` is shared memory for the number of steps. The process kills itself before the step `last`,
// and may write `bytes` bytes (-1: any number). Steps are appended to the file `log` (-1: none).
void disk_watch(const char *folder, long *count, long last, long bytes, int log) {
    root_length = strlen(folder);
    memcpy(root, folder, root_length + 1);
    steps = count;
    kill_at = last;
    room = bytes;
    record = log;
}

static void note(char kind, uint64_t inode, int64_t offset, const char *path, const char *other, const void *data, size_t bytes) {
    if (record < 0) return;
    struct step head = {kind, path ? strlen(path) : 0, other ? strlen(other) : 0, bytes, inode, offset};
    struct iovec parts[4] = {{&head, sizeof head}, {(void *)path, head.path}, {(void *)other, head.other}, {(void *)data, bytes}};
    if (syscall(SYS_writev, record, parts, 4) < 0) abort();
}

// Write a line of the caller into the record.
void disk_mark(const char *text) { note('N', 0, 0, text, NULL, NULL, 0); }

static int inside(const char *path) {
    return steps && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

// The full path of a name, whose folder may be a link, if it lies in the watched folder.
static int named(int folder, const char *name, char *path) {
    char whole[2 * PATH_MAX], place[64];
    if (!steps || !name) return 0;
    if (*name == '/') {
        snprintf(whole, sizeof whole, "%s", name);
    } else {
        char base[PATH_MAX] = "";
        if (folder == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            snprintf(place, sizeof place, "/proc/self/fd/%d", folder);
            ssize_t length = readlink(place, base, sizeof base - 1);
            if (length < 0) return 0;
            base[length] = 0;
        }
        snprintf(whole, sizeof whole, "%s/%s", base, name);
    }
    size_t length = strlen(whole);
    while (length > 1 && whole[length - 1] == '/') whole[--length] = 0;
    char *slash = strrchr(whole, '/');
    if (!slash || slash == whole) return 0;
    *slash = 0;
    char real[PATH_MAX];
    if (!realpath(whole, real)) return 0;
    return snprintf(path, PATH_MAX, "%s/%s", real, slash + 1) < PATH_MAX && inside(path);
}

static int opened_as(int file, char *path) {
    char place[64];
    if (!steps) return 0;
    snprintf(place, sizeof place, "/proc/self/fd/%d", file);
    ssize_t length = readlink(place, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return inside(path);
}

static int opened(int file) {
    char path[PATH_MAX];
    return opened_as(file, path);
}

static uint64_t inode_of(int file) {
    struct stat found;
    return fstat(file, &found) ? 0 : found.st_ino;
}

// Begin a step: true if the process must die now.
static int begin(void) {
    pthread_mutex_lock(&order);
    return ++*steps == kill_at;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static void end(void) {
    int error = errno;
    pthread_mutex_unlock(&order);
    errno = error;
}

static int refused(void) {
    if (room != 0) return 0;
    errno = ENOSPC;
    return 1;
}

static int open_in(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int changes = flags & (O_CREAT | O_TRUNC) && (flags & O_TMPFILE) != O_TMPFILE;
    if (!changes || !named(folder, name, path)) return REAL(openat)(folder, name, flags, mode);
    struct stat before;
    int there = !lstat(path, &before);
    if (there && !(flags & O_TRUNC)) return REAL(openat)(folder, name, flags, mode);
    if (begin()) die();
    int file = !there && refused() ? -1 : REAL(openat)(folder, name, flags, mode);
    if (file >= 0) note(there ? 'T' : 'C', inode_of(file), 0, path, NULL, NULL, 0);
    end();
    return file;
}

#define MODE va_list rest; va_start(rest, flags); mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest)
int open(const char *name, int flags, ...) { MODE; return open_in(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE; return open_in(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) {
    MODE;
    if (!steps) return syscall(SYS_openat, folder, name, flags, mode);
    return open_in(folder, name, flags, mode);
}
int openat64(int folder, const char *name, int flags, ...) { MODE; return openat(folder, name, flags, mode); }
int creat(const char *name, mode_t mode) { return open_in(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

FILE *fopen(const char *name, const char *mode) {
    char path[PATH_MAX];
    if (*mode != 'r' && named(AT_FDCWD, name, path)) {
        int flags = O_CREAT | O_CLOEXEC | (strchr(mode, '+') ? O_RDWR : O_WRONLY) | (*mode == 'w' ? O_TRUNC : O_APPEND);
        int file = open_in(AT_FDCWD, name, flags, 0666);
        return file < 0 ? NULL : fdopen(file, mode);
    }
    return REAL(fopen)(name, mode);
}
FILE *fopen64(const char *name, const char *mode) { return fopen(name, mode); }

static ssize_t write_at(int file, const void *data, size_t bytes, off_t offset) {
    if (!opened(file)) return offset < 0 ? REAL(write)(file, data, bytes) : REAL(pwrite)(file, data, bytes, offset);
    int dies = begin();
    if (dies && *steps & 1) die();  // otherwise it dies in the middle of the write
    size_t allowed = dies ? bytes / 2 : room < 0 || (long)bytes < room ? bytes : (size_t)room;
    ssize_t done = -1;
    if (bytes && !allowed && !dies) {
        errno = ENOSPC;
    } else {
        done = offset < 0 ? REAL(write)(file, data, allowed) : REAL(pwrite)(file, data, allowed, offset);
    }
    if (dies) die();
    if (done >= 0) {
        if (room > 0) room -= done;
        note('W', inode_of(file), offset < 0 ? lseek(file, 0, SEEK_CUR) - done : offset, NULL, NULL, data, done);
    }
    end();
    return done;
}

ssize_t write(int file, const void *data, size_t bytes) { return write_at(file, data, bytes, -1); }
ssize_t pwrite(int file, const void *data, size_t bytes, off_t offset) { return write_at(file, data, bytes, offset); }
ssize_t pwrite64(int file, const void *data, size_t bytes, off_t offset) { return write_at(file, data, bytes, offset); }

ssize_t writev(int file, const struct iovec *parts, int count) {
    if (!opened(file)) return REAL(writev)(file, parts, count);
    ssize_t total = 0;
    for (int i = 0; i < count; i++) {
        ssize_t done = write_at(file, parts[i].iov_base, parts[i].iov_len, -1);
        if (done < 0) return total ? total : done;
        total += done;
        if ((size_t)done < parts[i].iov_len) break;
    }
    return total;
}

size_t fwrite(const void *data, size_t size, size_t count, FILE *stream) {
    int file = fileno(stream);
    if (file < 0 || !opened(file)) return REAL(fwrite)(data, size, count, stream);
    fflush(stream);
    size_t total = 0;
    while (total < size * count) {
        ssize_t done = write_at(file, (const char *)data + total, size * count - total, -1);
        if (done <= 0) break;
        total += done;
    }
    int error = errno;
    fseeko(stream, lseek(file, 0, SEEK_CUR), SEEK_SET);
    errno = error;
    return size ? total / size : 0;
}

// Copies inside the system are refused, so that the caller reads and writes.
ssize_t sendfile(int to, int from, off_t *offset, size_t bytes) {
    if (!opened(to)) return REAL(sendfile)(to, from, offset, bytes);
    errno = EINVAL;
    return -1;
}
ssize_t sendfile64(int to, int from, off_t *offset, size_t bytes) { return sendfile(to, from, offset, bytes); }
ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *offset, size_t bytes, unsigned flags) {
    if (!opened(to)) return REAL(copy_file_range)(from, start, to, offset, bytes, flags);
    errno = EINVAL;
    return -1;
}

int ftruncate(int file, off_t size) {
    if (!opened(file)) return REAL(ftruncate)(file, size);
    if (begin()) die();
    int done = REAL(ftruncate)(file, size);
    if (!done) note('T', inode_of(file), size, NULL, NULL, NULL, 0);
    end();
    return done;
}
int ftruncate64(int file, off_t size) { return ftruncate(file, size); }

#define SYNC(name) int name(int file) { \
    char path[PATH_MAX]; \
    if (!opened_as(file, path)) return REAL(name)(file); \
    if (begin()) die(); \
    int done = REAL(name)(file); \
    if (!done) note('F', inode_of(file), 0, path, NULL, NULL, 0); \
    end(); \
    return done; \
}
SYNC(fsync)
SYNC(fdatasync)

// A step with one name, or two. A watched step is the call `call` between a count and a note.
#define ONE(kind, folder, name, call, refuse) \
    char path[PATH_MAX]; \
    if (!named(folder, name, path)) return call; \
    if (begin()) die(); \
    int done = refuse && refused() ? -1 : call; \
    struct stat found; \
    if (!done) note(kind, lstat(path, &found) ? 0 : found.st_ino, 0, path, NULL, NULL, 0); \
    end(); \
    return done;
#define TWO(kind, from, old, to, new, call) \
    char path[PATH_MAX], other[PATH_MAX]; \
    if (!named(from, old, path) || !named(to, new, other)) return call; \
    if (begin()) die(); \
    int done = call; \
    if (!done) note(kind, 0, 0, path, other, NULL, 0); \
    end(); \
    return done;

int mkdir(const char *name, mode_t mode) { ONE('M', AT_FDCWD, name, REAL(mkdir)(name, mode), 1) }
int mkdirat(int folder, const char *name, mode_t mode) { ONE('M', folder, name, REAL(mkdirat)(folder, name, mode), 1) }
int rmdir(const char *name) { ONE('U', AT_FDCWD, name, REAL(rmdir)(name), 0) }
int unlink(const char *name) { ONE('U', AT_FDCWD, name, REAL(unlink)(name), 0) }
int unlinkat(int folder, const char *name, int flags) { ONE('U', folder, name, REAL(unlinkat)(folder, name, flags), 0) }
int rename(const char *old, const char *new) { TWO('R', AT_FDCWD, old, AT_FDCWD, new, REAL(rename)(old, new)) }
int renameat(int from, const char *old, int to, const char *new) { TWO('R', from, old, to, new, REAL(renameat)(from, old, to, new)) }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    TWO('R', from, old, to, new, REAL(renameat2)(from, old, to, new, flags))
}
int link(const char *old, const char *new) { TWO('L', AT_FDCWD, old, AT_FDCWD, new, REAL(link)(old, new)) }
int linkat(int from, const char *old, int to, const char *new, int flags) {
    TWO('L', from, old, to, new, REAL(linkat)(from, old, to, new, flags))
}
int symlink(const char *target, const char *name) {
    char path[PATH_MAX];
    if (!named(AT_FDCWD, name, path)) return REAL(symlink)(target, name);
    if (begin()) die();
    int done = refused() ? -1 : REAL(symlink)(target, name);
    if (!done) note('S', 0, 0, path, target, NULL, 0);
    end();
    return done;
}
