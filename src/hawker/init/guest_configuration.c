/* What makes an idle guest into a machine, and what makes a copy of a guest another one.
 *
 * `start` has pairs of fields, a word and a value, carried out in order:
 *   clock N      nanoseconds since 1970           seed BYTES     for the kernel's random numbers
 *   disks ""     make the root of the disks `image` and `machine`
 *   hostname T   write T      "path\0content", e.g. of /proc/sys
 *   netlink B    a message of NETLINK_ROUTE, its acknowledgement awaited
 *   file B       "octal mode path\0content", with the directories it needs
 *   tmpfs T      "megabytes path"                 directory T
 *   readonly ""  the root from here on            pids N         most processes
 *   argument T, environment T (NAME=value), user T, cwd T, terminal "columns rows"
 */

static void set_clock(struct field value)
{
	long long ns = atoll(text_of(value));
	struct timespec now = {ns / 1000000000, ns % 1000000000};
	if (ns) clock_settime(CLOCK_REALTIME, &now);
}

/* Mixed in and made to count at once: until then a copy draws the same numbers as its template. */
static void add_seed(struct field value)
{
	struct { struct rand_pool_info info; uint8_t bytes[512]; } pool = {0};
	size_t length = value.length < sizeof pool.bytes ? value.length : sizeof pool.bytes;
	int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
	if (fd < 0) return;
	pool.info.entropy_count = (int)length * 8;
	pool.info.buf_size = (int)length;
	memcpy((uint8_t *)&pool + offsetof(struct rand_pool_info, buf), value.data ? value.data : (const uint8_t *)"", length);
	ioctl(fd, RNDADDENTROPY, &pool);
	ioctl(fd, RNDRESEEDCRNG);
	close(fd);
}

/* By its serial number, "" for any that has such a file system. */
static bool mount_disk_of(const char *serial, const char *type, const char *path, unsigned long flags)
{
	char name[300], found[64];
	DIR *directory = opendir("/sys/block");
	struct dirent *entry;
	bool done = false;
	while (directory && !done && (entry = readdir(directory))) {
		snprintf(name, sizeof name, "/sys/block/%s/serial", entry->d_name);
		if (entry->d_name[0] == '.' || !read_text(name, found, sizeof found)) continue;
		if (strncmp(found, serial, strlen(serial))) continue;
		snprintf(name, sizeof name, "/dev/%s", entry->d_name);
		mkdir(path, 0755);
		done = !mount(name, path, type, flags, "");
	}
	if (directory) closedir(directory);
	return done;
}

/* Firecracker gives disks serial numbers of its own, so there the file system decides. */
static bool mount_disk(const char *serial, const char *type, const char *path, unsigned long flags)
{
	return mount_disk_of(serial, type, path, flags) || mount_disk_of("", type, path, flags);
}

static void make_root(char *problem, size_t room)
{
	static const char *const MOVED[] = {"/dev", "/proc", "/sys"};
	char path[64];
	if (!mount_disk("image", "erofs", "/image", MS_RDONLY | MS_NOATIME)) {
		snprintf(problem, room, "the image's disk cannot be mounted: %s", strerror(errno));
		return;
	}
	if (!mount_disk("machine", "ext4", "/machine", MS_NOATIME)) {
		snprintf(problem, room, "the machine's disk cannot be mounted: %s", strerror(errno));
		return;
	}
	mkdir("/machine/upper", 0755);
	mkdir("/machine/work", 0755);
	mkdir("/root", 0755);
	if (mount("overlay", "/root", "overlay", 0, "lowerdir=/image,upperdir=/machine/upper,workdir=/machine/work")) {
		snprintf(problem, room, "the root cannot be mounted: %s", strerror(errno));
		return;
	}
	for (size_t i = 0; i < 3; i++) {
		snprintf(path, sizeof path, "/root%s", MOVED[i]);
		mkdir(path, 0755);
		mount(MOVED[i], path, NULL, MS_MOVE, NULL);
	}
	if (chdir("/root") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/"))
		snprintf(problem, room, "the root cannot be entered: %s", strerror(errno));
}

static void send_netlink(struct field message, char *problem, size_t room)
{
	struct { struct nlmsghdr head; struct nlmsgerr error; char more[512]; } answer = {0};
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	ssize_t n = fd < 0 ? -1 : send(fd, message.data, message.length, 0);
	if (n > 0) n = recv(fd, &answer, sizeof answer, 0);
	if (n > 0 && answer.head.nlmsg_type == NLMSG_ERROR && answer.error.error && answer.error.error != -EEXIST)
		snprintf(problem, room, "the network cannot be set up (message %d): %s", answer.error.msg.nlmsg_type,
			 strerror(-answer.error.error));
	else if (n <= 0)
		snprintf(problem, room, "the network cannot be set up: %s", strerror(errno));
	if (fd >= 0) close(fd);
}

static void make_file(char *value, const char *content, size_t length, char *problem, size_t room)
{
	char *path;
	mode_t mode = (mode_t)strtol(value, &path, 8);
	path += strspn(path, " ");
	make_parents(path);
	unlink(path); /* a link in the image is not followed */
	if (!write_file(path, content, length, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW) || chmod(path, mode))
		snprintf(problem, room, "file %s: %s", path, strerror(errno));
}

static void make_tmpfs(char *value, char *problem, size_t room)
{
	char *path, options[64];
	snprintf(options, sizeof options, "mode=1777,size=%ldm", strtol(value, &path, 10));
	path += strspn(path, " ");
	make_parents(path);
	mkdir(path, 0755);
	if (mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, options))
		snprintf(problem, room, "tmpfs %s: %s", path, strerror(errno));
}

/* One pair. `user` is kept for the end: it is looked up in the machine's files. */
static void carry_out(struct program *program, const char *word, struct field field, char **user, char *problem, size_t room)
{
	char *value = text_of(field), *second = value + strlen(value) + 1;
	size_t rest = field.length > strlen(value) ? field.length - strlen(value) - 1 : 0;
	if (!strcmp(word, "clock"))
		set_clock(field);
	else if (!strcmp(word, "seed"))
		add_seed(field);
	else if (!strcmp(word, "disks"))
		make_root(problem, room);
	else if (!strcmp(word, "hostname"))
		sethostname(value, strlen(value));
	else if (!strcmp(word, "write"))
		write_file(value, second, rest, O_WRONLY);
	else if (!strcmp(word, "netlink"))
		send_netlink(field, problem, room);
	else if (!strcmp(word, "file"))
		make_file(value, second, rest, problem, room);
	else if (!strcmp(word, "tmpfs"))
		make_tmpfs(value, problem, room);
	else if (!strcmp(word, "directory"))
		make_parents(value), mkdir(value, 0755);
	else if (!strcmp(word, "readonly"))
		mount(NULL, "/", NULL, MS_REMOUNT | MS_RDONLY, NULL);
	else if (!strcmp(word, "pids"))
		write_file(GROUP "/pids.max", value, strlen(value), O_WRONLY);
	else if (!strcmp(word, "argument") && program->argc < ARGUMENTS_MAX)
		program->argv[program->argc++] = value;
	else if (!strcmp(word, "environment"))
		set_environment(program, value);
	else if (!strcmp(word, "user"))
		*user = value;
	else if (!strcmp(word, "cwd"))
		program->cwd = value;
	else if (!strcmp(word, "terminal")) {
		char *rows;
		program->terminal = true;
		program->size.ws_col = (unsigned short)strtol(value, &rows, 10);
		program->size.ws_row = (unsigned short)strtol(rows, NULL, 10);
	}
}

static struct program *machine_program;

/* The program that `start` or `execute` is about, with everything done that comes before it. */
static struct program *configure(struct reader *fields, char *problem, size_t room)
{
	struct program *program = calloc(1, sizeof *program);
	char *user = NULL;
	if (!program) abort();
	if (machine_program) { /* a command: as the machine's program has it, unless told otherwise */
		for (int i = 0; i < machine_program->envc; i++) set_environment(program, machine_program->env[i]);
		program->cwd = machine_program->cwd;
		program->uid = machine_program->uid;
		program->gid = machine_program->gid;
		program->group_count = machine_program->group_count;
		memcpy(program->groups, machine_program->groups, sizeof program->groups);
	}
	while (!*problem) {
		struct field word = next_field(fields), value = next_field(fields);
		if (!word.data || !value.data) break;
		char name[24] = "";
		memcpy(name, word.data, word.length < 23 ? word.length : 23);
		carry_out(program, name, value, &user, problem, room);
	}
	if (!*problem && (user || !machine_program)) set_user(program, user ? user : text_of((struct field){NULL, 0}), problem, room);
	if (!*problem && !machine_program) machine_program = program;
	return program;
}
