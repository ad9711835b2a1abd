/* Small files of the kernel, and files of the machine. */
#define GROUP "/sys/fs/cgroup/machine"

static bool write_file(const char *path, const void *data, size_t length, int flags)
{
	int fd = open(path, flags | O_CLOEXEC, 0644);
	if (fd < 0) return false;
	bool done = true;
	for (size_t at = 0; done && at < length;) {
		ssize_t n = write(fd, (const char *)data + at, length - at);
		if (n > 0)
			at += n;
		else
			done = false;
	}
	close(fd);
	return done;
}

static bool read_text(const char *path, char *to, size_t room)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) return false;
	size_t length = 0;
	ssize_t n;
	while (length < room - 1 && (n = read(fd, to + length, room - 1 - length)) > 0) length += n;
	close(fd);
	to[length] = 0;
	return true;
}

/* The whole file; the caller frees it. NULL when it cannot be read. */
static char *read_whole(const char *path, size_t *length)
{
	struct bytes all = {0};
	char buffer[4096];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) return NULL;
	for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;) append(&all, buffer, n);
	close(fd);
	append(&all, "", 1);
	*length = all.length - 1;
	return (char *)all.data;
}

/* The number behind a word in a file of lines, -1 when it is not there. */
static long long number_after(const char *path, const char *word)
{
	char text[4096];
	if (!read_text(path, text, sizeof text)) return -1;
	for (char *line = text; line; line = strchr(line, '\n')) {
		if (*line == '\n') line++;
		if (!strncmp(line, word, strlen(word))) return atoll(line + strlen(word));
	}
	return -1;
}

/* Directories that a path needs, the last part of it not. */
static void make_parents(const char *path)
{
	char copy[4096];
	snprintf(copy, sizeof copy, "%s", path);
	for (char *at = copy + 1; *at; at++) {
		if (*at != '/') continue;
		*at = 0;
		mkdir(copy, 0755);
		*at = '/';
	}
}

static void append_json(char *to, size_t room, const char *text)
{
	size_t at = strlen(to);
	for (; *text && at + 8 < room; text++) {
		if (*text == '"' || *text == '\\') to[at++] = '\\';
		to[at++] = (unsigned char)*text < ' ' ? ' ' : *text;
	}
	to[at] = 0;
}
