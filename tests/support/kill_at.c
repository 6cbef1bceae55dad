/* Counts the changes that a process makes to the files below a folder, and kills the process at one of them.
 * Preloaded (LD_PRELOAD) by killed_runs.py, it sees what Python, PyTorch and safetensors do. A process that is killed in
 * a write has written half of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char watched[PATH_MAX];
static long events, deadly;

/* Watches a folder, and kills at this event (counted from 1; 0: never). */
void watch(const char *folder, long event) {
    strncpy(watched, folder, sizeof watched - 1);
    events = 0;
    deadly = event;
}

long count_events(void) { return events; }

static int below(const char *path) { return watched[0] && !strncmp(path, watched, strlen(watched)); }

/* Whether the event, at a path that may be relative to a folder's descriptor, is the deadly one. */
static int is_deadly(int folder, const char *path) {
    char link[64], full[2 * PATH_MAX] = "";
    if (path == NULL || path[0] != '/') {
        ssize_t length;
        if (folder == AT_FDCWD)
            length = getcwd(full, PATH_MAX) ? (ssize_t)strlen(full) : -1;
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            length = readlink(link, full, PATH_MAX - 1);
        }
        if (length < 0) return 0;
        full[length] = '\0';
        if (path != NULL) snprintf(full + length, PATH_MAX, "/%s", path);
        path = full;
    }
    return below(path) && ++events == deadly;
}

static void die(void) { kill(getpid(), SIGKILL); }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CHANGES (O_CREAT | O_TRUNC)

#define OPEN(name, folder, declaration, ...)                                     \
    int name declaration {                                                       \
        va_list rest;                                                            \
        va_start(rest, flags);                                                   \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                \
        va_end(rest);                                                            \
        if ((flags & CHANGES) && is_deadly(folder, path)) die();                 \
        return REAL(name)(__VA_ARGS__, flags, mode);                             \
    }
OPEN(open, AT_FDCWD, (const char *path, int flags, ...), path)
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), path)
OPEN(openat, folder, (int folder, const char *path, int flags, ...), folder, path)
OPEN(openat64, folder, (int folder, const char *path, int flags, ...), folder, path)

ssize_t write(int fd, const void *data, size_t size) {
    if (is_deadly(fd, NULL)) REAL(write)(fd, data, size / 2), die();
    return REAL(write)(fd, data, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (is_deadly(fd, NULL)) REAL(writev)(fd, parts, count / 2), die();
    return REAL(writev)(fd, parts, count);
}

#define AT_PATH(name, folder, path, declaration, ...)  \
    int name declaration {                             \
        if (is_deadly(folder, path)) die();            \
        return REAL(name)(__VA_ARGS__);                \
    }
AT_PATH(rename, AT_FDCWD, to, (const char *from, const char *to), from, to)
AT_PATH(renameat, b, to, (int a, const char *from, int b, const char *to), a, from, b, to)
AT_PATH(unlink, AT_FDCWD, path, (const char *path), path)
AT_PATH(unlinkat, folder, path, (int folder, const char *path, int flags), folder, path, flags)
AT_PATH(mkdir, AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
AT_PATH(mkdirat, folder, path, (int folder, const char *path, mode_t mode), folder, path, mode)
AT_PATH(rmdir, AT_FDCWD, path, (const char *path), path)
AT_PATH(ftruncate, fd, NULL, (int fd, off_t size), fd, size)
AT_PATH(ftruncate64, fd, NULL, (int fd, off64_t size), fd, size)
