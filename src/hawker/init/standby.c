/* A standby process: it waits until it is told which program to become. standby WAIT SAY.

   On WAIT come the length of all that follows, then strings, each with its zero: WAIT's name, a directory, where standard
   output and standard error go, the number of the user to become ("" for none), the files of its control groups, the
   program, its words, its environment; before each of these three lists stands their count. It enters a group by writing
   "0" to its file, which is quick for a process of one thread. The next byte, whoever wrote it, decides: "g" lets it
   become the program. It first removes WAIT's name: as long as that name is there, the program has not run. Any other
   byte, or the end of WAIT, tells it to end: the daemon that it waited for is gone, or wants it no more. When SAY ends,
   it waits no more; a number on SAY tells why the program cannot be run. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "user.h"

static char *at, *end;

static int all(int fd, void *to, size_t size)
{
    for (size_t got = 0; got < size;) {
        ssize_t some = read(fd, (char *)to + got, size - got);

        if (some == 0 || (some < 0 && errno != EINTR))
            return 0;
        got += some > 0 ? some : 0;
    }
    return 1;
}

static char *next(void)
{
    char *word = at;

    if (at >= end)
        exit(2);
    at += strlen(at) + 1;
    return word;
}

static char **list(void)
{
    long count = atol(next());
    char **words = count < 0 || count > end - at ? NULL : calloc(count + 1, sizeof *words);

    if (!words)
        exit(2);
    for (long n = 0; n < count; n++)
        words[n] = next();
    return words;
}

static int output(const char *path, int as)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);

    if (fd < 0 || dup2(fd, as) < 0)
        return errno;
    close(fd);
    return 0;
}

static int enter(const char *path)
{
    int group = open(path, O_WRONLY | O_CLOEXEC);
    int failed = group < 0 || write(group, "0", 1) != 1 ? errno : 0;

    if (group >= 0)
        close(group);
    return failed;
}

int main(int count, char **words)
{
    unsigned size;
    char byte, *name, *directory, *user, *program, **argv, **env;
    int error, wait, say;

    if (count != 3)
        return 2;
    wait = atoi(words[1]);
    say = atoi(words[2]);
    fcntl(wait, F_SETFD, FD_CLOEXEC);
    fcntl(say, F_SETFD, FD_CLOEXEC);
    if (!all(wait, &size, sizeof size))
        return 0;
    if (!(at = malloc(size + 1)) || !all(wait, at, size))
        return 0;
    end = at + size;
    *end = 0;
    name = next();
    directory = next();
    error = chdir(directory) ? errno : 0;
    for (int fd = 1; fd < 3; fd++) {
        int failed = output(next(), fd);

        error = error ? error : failed;
    }
    user = next();
    for (char **group = list(); *group; group++) {
        int failed = enter(*group);

        error = error ? error : failed;
    }
    program = next();
    argv = list();
    env = list();
    if (!all(wait, &byte, 1) || byte != 'g')
        return 0;
    if (unlink(name) && !error)
        error = errno;
    if (!error && *user && become(atol(user), atol(user), 0, NULL))
        error = errno;
    if (!error) {
        execve(program, argv, env);
        error = errno;
    }
    if (write(say, &error, sizeof error) != sizeof error)
        return 126;
    return 127;
}
