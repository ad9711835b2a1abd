/* Preloaded into a hypervisor that maps a file as its guest's memory and writes to its own copy of each page only.
 *
 * QEMU before 8.2 opens such a file for writing all the same (qemu's softmmu/physmem.c, file_ram_open). Many machines
 * are made from one file, so none of them may have it open for writing: the file named by HAWKER_READ_ONLY is opened
 * for reading, whatever is asked for. Later versions do so by themselves where they may not write.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int open_file(const char *path, int flags, mode_t mode)
{
	const char *kept = getenv("HAWKER_READ_ONLY");

	if (kept && strcmp(path, kept) == 0 && (flags & O_ACCMODE) == O_RDWR)
		flags = (flags & ~(O_ACCMODE | O_CREAT | O_TRUNC)) | O_RDONLY;
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static mode_t mode_of(int flags, va_list rest)
{
	return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

int open64(const char *path, int flags, ...)
{
	va_list rest;
	int fd;

	va_start(rest, flags);
	fd = open_file(path, flags, mode_of(flags, rest));
	va_end(rest);
	return fd;
}

int open(const char *path, int flags, ...) __attribute__((alias("open64")));

int __open64_2(const char *path, int flags)
{
	return open_file(path, flags, 0);
}

int __open_2(const char *path, int flags) __attribute__((alias("__open64_2")));
