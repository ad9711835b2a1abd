/* What the host may know of the machine: raw files of /proc, which the host reads (`microvm/figures.py`). */

static void send_use(struct bytes *to_agent, uint32_t id)
{
	char text[400], current[64] = "0";
	read_text(GROUP "/memory.current", current, sizeof current);
	snprintf(text, sizeof text, "cpu_us %lld\nmemory %lld\nprocesses %s", number_after(GROUP "/cpu.stat", "usage_usec "),
		 atoll(current), "");
	read_text(GROUP "/pids.current", current, sizeof current);
	snprintf(text + strlen(text), sizeof text - strlen(text), "%lld\n", atoll(current));
	send_text(to_agent, 'r', id, text);
}

static void append_file(struct bytes *payload, const char *path)
{
	size_t length = 0;
	char *whole = read_whole(path, &length);
	append_field(payload, whole ? whole : "", length < 60000 ? length : 60000);
	free(whole);
}

/* Inodes of sockets that a process has open, a line each. */
static void append_sockets(struct bytes *payload, const char *pid)
{
	char path[600], to[64], text[8192] = "";
	snprintf(path, sizeof path, "/proc/%s/fd", pid);
	DIR *directory = opendir(path);
	struct dirent *entry;
	while (directory && (entry = readdir(directory))) {
		snprintf(path, sizeof path, "/proc/%s/fd/%s", pid, entry->d_name);
		ssize_t n = readlink(path, to, sizeof to - 1);
		if (n < 9 || strncmp(to, "socket:[", 8) || strlen(text) + 64 > sizeof text) continue;
		to[n - 1] = 0;
		strcat(strcat(text, to + 8), "\n");
	}
	if (directory) closedir(directory);
	append_field(payload, text, strlen(text));
}

/* Fields: uptime, the two tables of TCP sockets, then for each process its pid, stat, cmdline, directory, sockets. */
static void send_processes(struct bytes *to_agent, uint32_t id)
{
	static const char *const TABLES[] = {"/proc/uptime", "/proc/net/tcp", "/proc/net/tcp6"};
	struct bytes payload = {0};
	char path[300], directory_of[4096];
	for (size_t i = 0; i < 3; i++) append_file(&payload, TABLES[i]);
	DIR *directory = opendir("/proc");
	struct dirent *entry;
	while (directory && (entry = readdir(directory)) && payload.length < FRAME_MAX / 3) {
		if (!all_digits(entry->d_name) || !strcmp(entry->d_name, "1")) continue;
		snprintf(path, sizeof path, "/proc/%s/exe", entry->d_name);
		if (readlink(path, directory_of, 8) < 0) continue; /* the kernel's own */
		append_field(&payload, entry->d_name, strlen(entry->d_name));
		snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
		append_file(&payload, path);
		snprintf(path, sizeof path, "/proc/%s/cmdline", entry->d_name);
		append_file(&payload, path);
		snprintf(path, sizeof path, "/proc/%s/cwd", entry->d_name);
		ssize_t n = readlink(path, directory_of, sizeof directory_of);
		append_field(&payload, directory_of, n > 0 ? (size_t)n : 0);
		append_sockets(&payload, entry->d_name);
	}
	if (directory) closedir(directory);
	send_frame(to_agent, 'r', id, payload.data, payload.length);
	free(payload.data);
}
