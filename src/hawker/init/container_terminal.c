/* The terminal of a container's program. The init holds its other end and copies what comes out of it to its own standard
 * output. That is a pipe whose reader may die and be followed by another one; until then nothing is lost, because the
 * program waits as it would at the pipe itself.
 */
#include <poll.h>
#include <sys/signalfd.h>

#define COPIED_AT_ONCE 16384
#define LAST_WORDS_MAX 65536 /* more than a terminal holds back */

/* The program's terminal. Our own copy of the program's end keeps it open: a program that closes all of its own for a
 * while may open it again. */
static int master = -1, slave = -1, signals = -1;

/* `size` is COLUMNSxROWS; (uid_t)-1 leaves it ours. -1: it cannot be made. */
static int open_terminal(const char *size, uid_t owner)
{
	struct winsize window = {0};
	sigset_t all;
	char *rows;
	int unlocked = 0;

	window.ws_col = (unsigned short)strtoul(size, &rows, 10);
	window.ws_row = *rows == 'x' ? (unsigned short)strtoul(rows + 1, NULL, 10) : 0;
	master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
	if (master < 0 || ioctl(master, TIOCSPTLCK, &unlocked) < 0)
		return -1;
	slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (slave < 0 || ioctl(slave, TIOCSWINSZ, &window) < 0)
		return -1;
	if (fchown(slave, owner, (gid_t)-1) < 0)
		return -1;
	sigfillset(&all);
	signals = signalfd(-1, &all, SFD_CLOEXEC);
	return signals < 0 ? -1 : fcntl(1, F_SETFL, fcntl(1, F_GETFL) | O_NONBLOCK);
}

/* What came out of the terminal and was not taken yet. Nobody may read for a while: then we must not wait, for signals
 * and orphans go on. */
static struct {
	char bytes[COPIED_AT_ONCE];
	size_t from, to;
} copied;

/* Copies one piece. How many bytes came out of the terminal; -1 when what came before is still not taken. */
static ssize_t copy(void)
{
	ssize_t came = 0, count;

	for (;;) {
		while (copied.from < copied.to) {
			count = write(1, copied.bytes + copied.from, copied.to - copied.from);
			if (count < 0 && errno == EAGAIN)
				return came ? came : -1;
			copied.from = count < 0 ? copied.to : copied.from + (size_t)count;
		}
		if (came || (came = read(master, copied.bytes, sizeof copied.bytes)) <= 0)
			return came < 0 ? 0 : came;
		copied.from = 0;
		copied.to = (size_t)came;
	}
}

/* What the program wrote before it ended. Others that have the terminal may go on for ever. */
static void copy_last_words(void)
{
	struct pollfd taker = {.fd = 1, .events = POLLOUT};
	ssize_t came;

	for (size_t sum = 0; sum < LAST_WORDS_MAX && (came = copy()) != 0; sum += came < 0 ? 0 : (size_t)came)
		if (came < 0)
			poll(&taker, 1, -1);
}

/* A signal, which is waited for; meanwhile the terminal is copied. 0 when there was none. */
static int next_signal(void)
{
	struct pollfd ready[3] = {
		{.fd = signals, .events = POLLIN},
		{.fd = copied.from < copied.to ? -1 : master, .events = POLLIN},
		{.fd = copied.from < copied.to ? 1 : -1, .events = POLLOUT},
	};
	struct signalfd_siginfo about;

	if (poll(ready, 3, -1) < 0)
		return 0;
	if (ready[1].revents || ready[2].revents)
		copy();
	if (!ready[0].revents || read(signals, &about, sizeof about) != sizeof about)
		return 0;
	return (int)about.ssi_signo;
}
