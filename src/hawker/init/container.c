/* PID 1 of a container: starts the program, forwards signals to it, reaps orphans, tells how it ended.
 *
 *   container [--status-fd N] [--go-fd N] [--terminal COLUMNSxROWS]
 *             [--root DIR] [--users N:FIRST] [--cwd DIR] [--user UID:GID[,GID...]] -- PROGRAM [ARGUMENT...]
 *
 * To descriptor N (never seen by the program) go lines of JSON, each written at once:
 *   {"started": PID}            the program runs (execve succeeded); PID as the init sees it
 *   {"error": "...", "code": C} it could not be started: 127 not found, 126 not executable, 125 the rest; the last line
 *   {"code": C} or {"signal": S}  how the program ended; the last line
 * Exit status: the program's code, or 128 + signal, or C of the error.
 *
 * With --go-fd the program is not started before a byte can be read from that descriptor: until then the machine is
 * made ready. Where it is closed instead nothing is started; the exit status is 125.
 *
 * With --terminal the program's standard streams are a terminal of its own, and what comes out of it is copied to our
 * standard output. We hold the terminal's other end: whoever reads our output may die and another one come.
 *
 * A PROGRAM without a slash is looked up in PATH. --root, --users, --cwd and --user are for use without a container
 * runtime, which does all that itself; then the init is no PID 1 but a subreaper, and what outlives the program is left
 * to whoever started it. Descriptor N of --users is a user namespace, whose users --user means; its first is our FIRST.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "container_status.c"
#include "container_terminal.c"
#include "user.h"

#define FAILED 125
#define NOT_EXECUTABLE 126
#define NOT_FOUND 127
#define MAX_GROUPS 256

extern char **environ;

static const char *root, *cwd;
static int users_fd = -1;
static uid_t first_user;
static uid_t uid;
static gid_t groups[MAX_GROUPS]; /* the first is the main one */
static size_t group_count;

/* --- an error on the way to the program, carried from the child to the init -------------------------------------- */

struct failure {
	int code;
	struct text why;
};

_Static_assert(sizeof(struct failure) <= PIPE_BUF, "is written in one piece");

static _Noreturn void fail(int fd, int code, const char *what, const char *why)
{
	struct failure failure = {.code = code};

	failure.why.length = 0;
	add(&failure.why, what);
	if (failure.why.length > MAX_TEXT / 2)
		failure.why.length = MAX_TEXT / 2;
	add(&failure.why, ": ");
	add(&failure.why, why);
	if (write(fd, &failure, sizeof failure) < 0)
		_exit(FAILED);
	_exit(code);
}

static const char *reason(int error)
{
	switch (error) { /* strerror would bring the translations of all messages with it */
	case EACCES: return "permission denied";
	case EPERM: return "operation not permitted";
	case ENOENT: return "not found";
	case ENOTDIR: return "not a directory";
	case ELOOP: return "too many symbolic links";
	case ENOEXEC: return "not a program for this machine, nor a script that names its interpreter";
	case ENOMEM: return "not enough memory";
	case E2BIG: return "the arguments and the environment are too long";
	case ETXTBSY: return "is being written";
	case EROFS: return "read-only file system";
	case EAGAIN: return "too many processes";
	case EINVAL: return "invalid";
	case ENAMETOOLONG: return "name too long";
	default: return "the kernel refused it";
	}
}

static int number_of(int error)
{
	return error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENAMETOOLONG ? NOT_FOUND : NOT_EXECUTABLE;
}

static int is_program(const char *path)
{
	struct stat found;

	if (stat(path, &found) < 0)
		return 0;
	if (!S_ISREG(found.st_mode) || access(path, X_OK) < 0) {
		errno = EACCES;
		return 0;
	}
	return 1;
}

static _Noreturn void run(int fd, char **argv)
{
	static char path[PATH_MAX];
	const char *search = getenv("PATH"), *end;
	int denied = 0;

	if (!*argv[0])
		fail(fd, NOT_FOUND, "\"\"", "not found");
	if (strchr(argv[0], '/')) {
		if (!is_program(argv[0]))
			fail(fd, number_of(errno), argv[0], errno == EACCES ? "not an executable file" : reason(errno));
		execve(argv[0], argv, environ);
		fail(fd, number_of(errno), argv[0], errno == ENOENT ? "its interpreter is not found" : reason(errno));
	}
	for (; search; search = *end ? end + 1 : NULL) {
		size_t length;

		end = strchrnul(search, ':');
		length = (size_t)(end - search);
		if (length + strlen(argv[0]) + 3 > sizeof path)
			continue;
		memcpy(path, length ? search : ".", length ? length : 1);
		path[length ? length : 1] = '/';
		strcpy(path + (length ? length : 1) + 1, argv[0]);
		if (is_program(path)) {
			execve(path, argv, environ);
			if (errno != EACCES)
				fail(fd, number_of(errno), argv[0], errno == ENOENT ? "its interpreter is not found" : reason(errno));
		}
		denied |= errno == EACCES;
	}
	if (denied)
		fail(fd, NOT_EXECUTABLE, argv[0], "not an executable file");
	fail(fd, NOT_FOUND, argv[0], getenv("PATH") ? "not found in PATH" : "not found: PATH is not set");
}

/* --- without a runtime: root, directory and user ------------------------------------------------------------------ */

static void make_directories(const char *path)
{
	static char part[PATH_MAX];
	size_t length = strlen(path);

	if (length >= sizeof part)
		return;
	for (size_t i = 1; i <= length; i++)
		if (path[i] == '/' || !path[i]) {
			memcpy(part, path, i);
			part[i] = 0;
			mkdir(part, 0755);
		}
}

/* Be root of a user namespace, with what Docker gives a root that is of use to files and processes: not what mounting,
 * leaving a root directory or making a further namespace takes. -1: errno says why not. */
static int enter_users(int fd)
{
	/* CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SETFCAP */
	static const unsigned char kept[] = {0, 1, 3, 4, 5, 6, 7, 8, 10, 31};

	if (setns(fd, CLONE_NEWUSER) < 0)
		return -1;
	for (unsigned long number = 0, at = 0; prctl(PR_CAPBSET_READ, number, 0, 0, 0) >= 0; number++)
		if (at < sizeof kept && number == kept[at])
			at++;
		else if (prctl(PR_CAPBSET_DROP, number, 0, 0, 0) < 0)
			return -1;
	return 0;
}

static void enter(int fd)
{
	if (root && chdir(root) < 0) /* while we may */
		fail(fd, FAILED, root, reason(errno));
	if (users_fd >= 0 && enter_users(users_fd) < 0)
		fail(fd, FAILED, "--users", reason(errno));
	if (root && (chroot(".") < 0 || chdir("/") < 0))
		fail(fd, FAILED, root, reason(errno));
	if (cwd) {
		if (root)
			make_directories(cwd);
		if (chdir(cwd) < 0)
			fail(fd, FAILED, cwd, reason(errno));
	}
	if (group_count && become(uid, groups[0], group_count, groups) < 0)
		fail(fd, FAILED, "--user", reason(errno));
}

/* --- the init ------------------------------------------------------------------------------------------------------- */

/* Gives up the terminal that the runtime made ours, so that the program's own session can take it. */
static void give_up_terminal(void)
{
	static const struct timespec now;
	sigset_t hangup;

	if (getsid(0) != getpid() || ioctl(0, TIOCNOTTY) < 0)
		return;
	sigemptyset(&hangup); /* what the kernel sends about it is not for the program */
	sigaddset(&hangup, SIGHUP);
	sigaddset(&hangup, SIGCONT);
	while (sigtimedwait(&hangup, NULL, &now) > 0)
		;
}

static pid_t start(char **argv, int *error_fd)
{
	int ends[2];
	sigset_t none;
	pid_t child;

	if (pipe2(ends, O_CLOEXEC) < 0)
		return -1;
	child = fork();
	if (child) {
		close(ends[1]);
		*error_fd = ends[0];
		return child;
	}
	setsid();
	for (int i = 0; slave >= 0 && i < 3; i++)
		dup2(slave, i);
	ioctl(0, TIOCSCTTY, 0); /* fails where there is no terminal */
	enter(ends[1]);
	for (int number = 1; number < NSIG; number++)
		signal(number, SIG_DFL); /* ignored by who started us, it would be by the program: no signal to stop it */
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	run(ends[1], argv);
}

/* Reaps all that ended. Returns 1 when the program did. */
static int reap(pid_t program, int *status)
{
	int one, ended = 0;
	pid_t pid;

	while ((pid = waitpid(-1, &one, WNOHANG)) > 0)
		if (pid == program) {
			*status = one;
			ended = 1;
		}
	return ended;
}

static int supervise(pid_t program)
{
	sigset_t all;
	int status = 0, number;

	sigfillset(&all);
	for (;;) {
		number = master < 0 ? sigwaitinfo(&all, NULL) : next_signal();
		if (number == SIGCHLD && reap(program, &status))
			break;
		if (number > 0 && number != SIGCHLD)
			kill(program, number);
	}
	if (master >= 0)
		copy_last_words();
	if (WIFSIGNALED(status))
		return 128 + tell_number("signal", (unsigned long)WTERMSIG(status));
	return tell_number("code", (unsigned long)WEXITSTATUS(status));
}

static int refuse(int code, const char *text, size_t length)
{
	struct text line = {0};

	add(&line, "{\"error\": \"");
	add_escaped(&line, text, length);
	if (line.length > MAX_TEXT - 32)
		line.length = MAX_TEXT - 32;
	add(&line, "\", \"code\": ");
	add_number(&line, (unsigned long)code);
	add(&line, "}");
	tell(&line);
	if (status_fd < 0) {
		if (write(2, text, length) < 0 || write(2, "\n", 1) < 0)
			return code;
	}
	return code;
}

static int misused(const char *text)
{
	return refuse(FAILED, text, strlen(text));
}

/* Whoever made the machine may end before it is ready; then the machine ends, too. */
static int told_to_go(int fd)
{
	ssize_t got;
	char byte;

	do
		got = read(fd, &byte, 1);
	while (got < 0 && errno == EINTR);
	close(fd);
	return got == 1;
}

static int parse_user(const char *text)
{
	char *end;

	uid = (uid_t)strtoul(text, &end, 10);
	while (end != text && (*end == ':' || *end == ',') && group_count < MAX_GROUPS) {
		text = end + 1;
		groups[group_count++] = (gid_t)strtoul(text, &end, 10);
	}
	return end != text && !*end && group_count;
}

int main(int argc, char **argv)
{
	struct failure failure;
	sigset_t all;
	pid_t program;
	const char *terminal = NULL;
	int error_fd, go_fd = -1, at = 1;
	ssize_t got;

	for (; at < argc && strcmp(argv[at], "--") != 0; at += 2) {
		if (at + 1 >= argc)
			return misused("init: an option without its value");
		if (strcmp(argv[at], "--status-fd") == 0)
			status_fd = atoi(argv[at + 1]);
		else if (strcmp(argv[at], "--go-fd") == 0)
			go_fd = atoi(argv[at + 1]);
		else if (strcmp(argv[at], "--users") == 0 && strchr(argv[at + 1], ':')) {
			users_fd = atoi(argv[at + 1]);
			first_user = (uid_t)strtoul(strchr(argv[at + 1], ':') + 1, NULL, 10);
		}
		else if (strcmp(argv[at], "--terminal") == 0)
			terminal = argv[at + 1];
		else if (strcmp(argv[at], "--root") == 0)
			root = argv[at + 1];
		else if (strcmp(argv[at], "--cwd") == 0)
			cwd = argv[at + 1];
		else if (strcmp(argv[at], "--user") != 0 || !parse_user(argv[at + 1]))
			return misused("init: unknown option, or --user is not UID:GID");
	}
	if (at + 1 >= argc)
		return misused("init: no program");
	argv += at + 1;

	/* Without this the program, which has the same user, could open our descriptors in /proc or trace us. */
	if (getpid() == 1 || root) /* else it is a program of the host, for which nothing is hidden, nor us from our owner */
		prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
	/* Descriptors that the runtime forgot must not reach the program. 4: CLOSE_RANGE_CLOEXEC */
	syscall(SYS_close_range, 3U, ~0U, 4U);
	if (status_fd >= 0)
		fcntl(status_fd, F_SETFD, FD_CLOEXEC);
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	signal(SIGCHLD, SIG_DFL); /* inherited as ignored, children would leave no status */
	give_up_terminal();

	if (go_fd >= 0 && !told_to_go(go_fd))
		return misused("init: it was not released: whoever made this machine ended first");
	if (terminal && open_terminal(terminal, group_count ? first_user + uid : (uid_t)-1) < 0)
		return misused("init: the program's terminal cannot be made");
	program = start(argv, &error_fd);
	if (program < 0)
		return misused("init: the kernel made no process: too many processes, or no memory");
	do
		got = read(error_fd, &failure, sizeof failure);
	while (got < 0 && errno == EINTR);
	close(error_fd);
	if (got == sizeof failure) {
		waitpid(program, NULL, 0);
		return refuse(failure.code, failure.why.bytes, failure.why.length);
	}
	tell_number("started", (unsigned long)program);
	return supervise(program);
}
