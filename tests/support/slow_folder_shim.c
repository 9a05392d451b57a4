/* Preloaded into a process, it makes calls for files below some folders slow, or lets them wait, as a network file system may: open, stat,
   list and read. Which folders, and how long, is in the file that SLOW_FOLDERS_FILE names, and may change at any moment; that file also
   counts the calls that wait. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define FOLDERS 64
#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

struct folder {
    int64_t pause;   /* nanoseconds that each call takes; 0: no folder is here; below 0: until this changes */
    int64_t waiting; /* calls that wait now */
    char path[240];
};

static volatile struct folder *folders;

__attribute__((constructor)) static void map_folders(void) {
    const char *path = getenv("SLOW_FOLDERS_FILE");
    int file = path ? REAL(open)(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, FOLDERS * sizeof *folders, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        folders = mapped;
}

static void sleep_for(int64_t nanoseconds) {
    struct timespec left = {nanoseconds / SECOND, nanoseconds % SECOND};
    while (nanosleep(&left, &left) && errno == EINTR) /* no signal ends the wait, as on a network file system */
        ;
}

static void wait_for(const char *path) {
    int saved = errno;
    for (int index = 0; folders && path && index < FOLDERS; index++) {
        volatile struct folder *folder = &folders[index];
        int64_t pause = folder->pause;
        size_t length = pause ? strlen((const char *)folder->path) : 0;
        if (!pause || strncmp(path, (const char *)folder->path, length) || (path[length] && path[length] != '/'))
            continue;
        __atomic_add_fetch(&folder->waiting, 1, __ATOMIC_SEQ_CST);
        if (pause > 0)
            sleep_for(pause);
        while (folder->pause < 0)
            sleep_for(SECOND / 50);
        __atomic_sub_fetch(&folder->waiting, 1, __ATOMIC_SEQ_CST);
    }
    errno = saved;
}

static void wait_for_file(int file) {
    int any = 0, saved = errno;
    for (int index = 0; folders && index < FOLDERS; index++)
        any |= folders[index].pause != 0;
    if (!any)
        return;
    char link[40], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (length <= 0)
        return;
    path[length] = 0;
    wait_for(path);
}

#define OPENING(name)                                                       \
    int name(const char *path, int flags, ...) {                            \
        mode_t mode = 0;                                                    \
        if (flags & (O_CREAT | __O_TMPFILE)) {                              \
            va_list rest;                                                   \
            va_start(rest, flags);                                          \
            mode = va_arg(rest, mode_t);                                    \
            va_end(rest);                                                   \
        }                                                                   \
        wait_for(path);                                                     \
        return REAL(name)(path, flags, mode);                               \
    }
OPENING(open)
OPENING(open64)

#define LOOKING(name, type)                                                 \
    int name(const char *restrict path, struct type *restrict status) {     \
        wait_for(path);                                                     \
        return REAL(name)(path, status);                                    \
    }
LOOKING(stat, stat)
LOOKING(stat64, stat64)

DIR *opendir(const char *path) {
    wait_for(path);
    return REAL(opendir)(path);
}

ssize_t read(int file, void *bytes, size_t most) {
    wait_for_file(file);
    return REAL(read)(file, bytes, most);
}

#define READING_AT(name, offset_type)                                       \
    ssize_t name(int file, void *bytes, size_t most, offset_type offset) {  \
        wait_for_file(file);                                                \
        return REAL(name)(file, bytes, most, offset);                       \
    }
READING_AT(pread, off_t)
READING_AT(pread64, off64_t)
