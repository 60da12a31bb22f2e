/* Preloaded into a program: a sync of a file whose name ends with $FAIL_SYNC_OF fails, once for each time that
 * somebody makes the file $FAIL_SYNC. As on a real disk, what was to be synced is gone then (it reads as zeros),
 * and the next sync calls it a success. And while the file $QUOTA_USED_UP exists, nothing beside it can be written. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILES_MAX 4096
/* How long each file was at its last good sync. */
static off_t synced[FILES_MAX];

static int is_meant(int fd) {
    const char *end = getenv("FAIL_SYNC_OF");
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path);
    if (!end || fd >= FILES_MAX || length < 0 || (size_t)length < strlen(end)) return 0;
    return memcmp(path + length - strlen(end), end, strlen(end)) == 0;
}

static int sync_with(int fd, const char *name) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    const char *order = getenv("FAIL_SYNC");
    struct stat file;
    if (!is_meant(fd) || fstat(fd, &file)) return real(fd);
    if (order && unlink(order) == 0) {
        for (off_t at = synced[fd]; at < file.st_size; at++)
            if (pwrite(fd, "", 1, at) != 1) abort();
        errno = EIO;
        return -1;
    }
    int result = real(fd);
    if (result == 0) synced[fd] = file.st_size;
    return result;
}

int fsync(int fd) { return sync_with(fd, "fsync"); }
int fdatasync(int fd) { return sync_with(fd, "fdatasync"); }

static int is_used_up(int fd) {
    const char *quota = getenv("QUOTA_USED_UP");
    char link[64], path[PATH_MAX];
    if (!quota || access(quota, F_OK)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path), folder = strrchr(quota, '/') - quota;
    if (length < folder || memcmp(path, quota, folder) != 0) return 0;
    errno = EDQUOT;
    return 1;
}

ssize_t write(int fd, const void *bytes, size_t length) {
    ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    return is_used_up(fd) ? -1 : real(fd, bytes, length);
}

ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t at) {
    ssize_t (*real)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    return is_used_up(fd) ? -1 : real(fd, bytes, length, at);
}

ssize_t pwrite(int fd, const void *bytes, size_t length, off_t at) { return pwrite64(fd, bytes, length, at); }
