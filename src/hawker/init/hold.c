/* What waits in front of a program, as the program's own process: hold WAIT SAY PROGRAM COUNT GROUP... WORD...

   What the program is to have, it has already: its session, directory, environment, descriptors. Into its control groups
   it goes by writing "0" to these files: what waits is one thread, for which that is quick. A byte from WAIT then lets it
   become the program; the end of WAIT means that whoever held it is gone, or has thought better of it. The end of SAY
   tells that the program runs, a number on it why it cannot. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **words)
{
    char byte;
    ssize_t got;
    int error = 0, wait, say, groups;

    if (count < 5 || count < 6 + atoi(words[4]))
        return 2;
    groups = atoi(words[4]);
    wait = atoi(words[1]);
    say = atoi(words[2]);
    fcntl(wait, F_SETFD, FD_CLOEXEC);
    fcntl(say, F_SETFD, FD_CLOEXEC);
    for (int n = 5; n < 5 + groups && !error; n++) {
        int group = open(words[n], O_WRONLY | O_CLOEXEC);

        if (group < 0 || write(group, "0", 1) != 1)
            error = errno;
        if (group >= 0)
            close(group);
    }
    do
        got = read(wait, &byte, 1);
    while (got < 0 && errno == EINTR);
    if (got != 1)
        return 0;
    if (!error) {
        execve(words[3], words + 5 + groups, environ);
        error = errno;
    }
    if (write(say, &error, sizeof error) != sizeof error)
        return 126;
    return 127;
}
