/* Programs: who runs them, how they are started, and moving what they write. */

enum { ARGUMENTS_MAX = 4096, GROUPS_MAX = 64, PIPE_ROOM = 65536 };

struct program {
	char *argv[ARGUMENTS_MAX + 1], *env[ARGUMENTS_MAX + 1];
	int argc, envc;
	const char *cwd;
	uid_t uid;
	gid_t gid, groups[GROUPS_MAX];
	int group_count;
	bool terminal;
	struct winsize size;
	int input, output, error; /* the guest's ends; a terminal's is all of them, and `error` -1 */
};

/* What is read from a program and written to a port. */
struct pump {
	int from;
	struct bytes waiting;
};

/* Move what is there now. True when something moved. */
static bool pump(struct pump *it, int to)
{
	static char buffer[PIPE_ROOM];
	bool some = false;
	for (;;) {
		size_t before = it->waiting.length;
		flush(to, &it->waiting);
		some |= it->waiting.length < before;
		if (it->waiting.length || it->from < 0) return some;
		ssize_t n = read(it->from, buffer, sizeof buffer);
		if (n < 0 && (errno == EAGAIN || errno == EINTR)) return some;
		if (n <= 0) { /* a terminal says EIO when nobody has it any more */
			close(it->from);
			it->from = -1;
			return true;
		}
		append(&it->waiting, buffer, n);
	}
}

static const char *environment(struct program *program, const char *name)
{
	size_t length = strlen(name);
	for (int i = program->envc - 1; i >= 0; i--)
		if (!strncmp(program->env[i], name, length) && program->env[i][length] == '=') return program->env[i] + length + 1;
	return NULL;
}

/* Later values take the place of earlier ones. */
static void set_environment(struct program *program, char *assignment)
{
	size_t length = strcspn(assignment, "=") + 1;
	for (int i = 0; i < program->envc; i++)
		if (!strncmp(program->env[i], assignment, length)) {
			program->env[i] = assignment;
			return;
		}
	if (program->envc < ARGUMENTS_MAX) program->env[program->envc++] = assignment;
}

/* The file to execute, looked up in PATH unless it has a slash. */
static bool find_program(struct program *program, char *path, size_t room, char *problem, size_t problem_room)
{
	const char *name = program->argv[0], *search = environment(program, "PATH");
	struct stat about;
	if (!search) search = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
	if (strchr(name, '/')) {
		snprintf(path, room, "%s", name);
		if (stat(path, &about))
			snprintf(problem, problem_room, "%s: not found", name);
		else if (!S_ISREG(about.st_mode) || access(path, X_OK))
			snprintf(problem, problem_room, "%s: not an executable file", name);
		return !*problem;
	}
	for (const char *at = search; *name; at += strcspn(at, ":") + 1) {
		int length = (int)strcspn(at, ":");
		snprintf(path, room, "%.*s/%s", length, length ? at : ".", name);
		if (!stat(path, &about) && S_ISREG(about.st_mode) && !access(path, X_OK)) return true;
		if (!at[length]) break;
	}
	snprintf(problem, problem_room, "%s: not found in PATH (%s)", name, search);
	return false;
}

/* Fields of a line of passwd or group, cut in place. */
static int cut_fields(char *line, char *fields[8])
{
	int count = 0;
	for (char *at = line; at && count < 8;) fields[count++] = strsep(&at, ":");
	return count;
}

static bool all_digits(const char *text) { return *text && !text[strspn(text, "0123456789")]; }

/* `name|uid[:group|gid]`, looked up in the machine's files. HOME is set where it is not. */
static void set_user(struct program *program, char *user, char *problem, size_t room)
{
	char *group = strchr(user, ':'), *fields[8], *name = NULL;
	const char *home = "/";
	bool found = false;
	size_t length;
	if (group) *group++ = 0;
	if (!*user) user = (char *)"0";
	char *passwd = read_whole("/etc/passwd", &length), *rest = passwd;
	for (char *line; (line = strsep(&rest, "\n"));) {
		if (cut_fields(line, fields) < 7) continue;
		if (strcmp(fields[0], user) && !(all_digits(user) && atoll(fields[2]) == atoll(user))) continue;
		name = fields[0];
		program->uid = (uid_t)atoll(fields[2]);
		program->gid = (gid_t)atoll(fields[3]);
		home = fields[5];
		found = true;
		break;
	}
	if (!found && all_digits(user)) {
		program->uid = (uid_t)atoll(user);
		program->gid = 0;
		if (!program->uid) home = "/root";
	} else if (!found) {
		snprintf(problem, room, "user %s: not in the image's /etc/passwd", user);
		free(passwd);
		return;
	}
	char *lines = read_whole("/etc/group", &length);
	bool group_found = false;
	rest = lines;
	for (char *line; (line = strsep(&rest, "\n"));) {
		if (cut_fields(line, fields) < 4) continue;
		gid_t gid = (gid_t)atoll(fields[2]);
		if (group && !strcmp(fields[0], group)) program->gid = gid, group_found = true;
		for (char *member; !group && name && (member = strsep(&fields[3], ","));)
			if (!strcmp(member, name) && program->group_count < GROUPS_MAX) program->groups[program->group_count++] = gid;
	}
	if (group && !group_found) {
		if (all_digits(group))
			program->gid = (gid_t)atoll(group);
		else
			snprintf(problem, room, "group %s: not in the image's /etc/group", group);
	}
	if (!environment(program, "HOME")) {
		char assignment[512];
		snprintf(assignment, sizeof assignment, "HOME=%s", *home ? home : "/");
		set_environment(program, text_of((struct field){(uint8_t *)assignment, strlen(assignment)}));
	}
	free(lines), free(passwd);
}

static void become(struct program *program, const char *group, const char *path, int standard[3], int report)
{
	char file[300];
	sigset_t none;
	const char *failed = "the process cannot be set up";
	snprintf(file, sizeof file, "%s/cgroup.procs", group);
	write_file(file, "0", 1, O_WRONLY);
	setsid();
	for (int i = 0; i < 3; i++) dup2(standard[i], i);
	if (program->terminal) {
		ioctl(0, TIOCSCTTY, 0);
		fchown(0, program->uid, (gid_t)-1);
	}
	for (int i = 1; i < NSIG; i++) signal(i, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (setgroups(program->group_count, program->groups) || setresgid(program->gid, program->gid, program->gid) ||
	    setresuid(program->uid, program->uid, program->uid))
		goto out;
	failed = "its working directory cannot be entered";
	if (program->cwd && chdir(program->cwd)) goto out;
	failed = "it cannot be executed";
	execve(path, program->argv, program->env);
	if (errno == ENOEXEC) { /* a script without #!, as shells run it */
		char *shell[ARGUMENTS_MAX + 2] = {"sh", (char *)path};
		for (int i = 1; i <= program->argc; i++) shell[i + 1] = program->argv[i];
		execve("/bin/sh", shell, program->env);
		errno = ENOEXEC;
	}
out:
	dprintf(report, "%s: %s: %s", program->argv[0], failed, strerror(errno));
	_exit(127);
}

static int open_terminal(struct winsize size, int *other)
{
	int main_end = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK), unlock = 0;
	if (main_end < 0) return -1;
	ioctl(main_end, TIOCSPTLCK, &unlock);
	*other = ioctl(main_end, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (size.ws_col) ioctl(main_end, TIOCSWINSZ, &size);
	return main_end;
}

/* Start it in a control group. The pid, or 0 with a problem, and nothing left then. */
static pid_t spawn(struct program *program, const char *group, char *problem, size_t room)
{
	char path[4096];
	int in[2] = {-1, -1}, out[2] = {-1, -1}, err[2] = {-1, -1}, report[2], standard[3] = {-1, -1, -1};
	program->input = program->output = program->error = -1;
	if (!program->argc) {
		snprintf(problem, room, "nothing to run: the image has no command and none was given");
		return 0;
	}
	if (program->cwd && chdir(program->cwd)) { /* for what is looked up relative to it */
		snprintf(problem, room, "%s: working directory %s: %s", program->argv[0], program->cwd, strerror(errno));
		return 0;
	}
	bool found = find_program(program, path, sizeof path, problem, room);
	if (!found || pipe2(report, O_CLOEXEC)) {
		if (chdir("/")) return 0;
		return 0;
	}
	if (program->terminal) {
		program->input = open_terminal(program->size, &standard[0]);
		program->output = program->input < 0 ? -1 : fcntl(program->input, F_DUPFD_CLOEXEC, 3);
		standard[1] = standard[2] = standard[0];
	} else if (!pipe2(in, O_CLOEXEC) && !pipe2(out, O_CLOEXEC) && !pipe2(err, O_CLOEXEC)) {
		program->input = in[1], program->output = out[0], program->error = err[0];
		standard[0] = in[0], standard[1] = out[1], standard[2] = err[1];
		fcntl(in[1], F_SETFL, O_NONBLOCK), fcntl(out[0], F_SETFL, O_NONBLOCK), fcntl(err[0], F_SETFL, O_NONBLOCK);
	}
	pid_t pid = program->output < 0 ? -1 : fork();
	if (!pid) become(program, group, path, standard, report[1]);
	if (pid < 0) snprintf(problem, room, "%s: no process can be made: %s", program->argv[0], strerror(errno));
	close(report[1]);
	if (program->output >= 0) {
		close(standard[0]);
		if (!program->terminal) close(standard[1]), close(standard[2]);
	}
	ssize_t n = pid < 0 ? 0 : read(report[0], problem, room - 1);
	close(report[0]);
	if (chdir("/")) n = 0;
	if (n > 0) problem[n] = 0;
	if (!*problem) return pid;
	close(program->input), close(program->output), close(program->error);
	if (pid > 0) waitpid(pid, NULL, 0);
	return 0;
}
