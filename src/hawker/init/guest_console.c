/* Where there are no virtio ports, as with Firecracker: the serial console, a status drive, and the agent on vsock.
 *
 * The kernel's command line says so: with `hawker.console=serial` all that the program writes goes to the first serial
 * port, and the line that tells its end is written to the start of the status drive, which is known by its size, as
 * Firecracker names no disk; with `hawker.agent=vsock` the agent is a stream socket on port 1. A new connection takes
 * the place of one before it: there is one daemon.
 */
enum { AGENT_PORT = 1, STATUS_SECTORS = 8 };

static int listener = -1;

static bool told(const char *word)
{
	char line[4096];
	return read_text("/proc/cmdline", line, sizeof line) && strstr(line, word);
}

/* As it is written: no carriage returns are added, nothing is echoed. */
static int open_serial(void)
{
	struct termios raw;
	int fd = open("/dev/ttyS0", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0 || tcgetattr(fd, &raw)) return fd;
	cfmakeraw(&raw);
	raw.c_cflag |= CLOCAL;
	tcsetattr(fd, TCSANOW, &raw);
	return fd;
}

static int open_status_drive(void)
{
	char path[300], sectors[32];
	DIR *directory = opendir("/sys/block");
	struct dirent *entry;
	int fd = -1;
	while (directory && fd < 0 && (entry = readdir(directory))) {
		snprintf(path, sizeof path, "/sys/block/%s/size", entry->d_name);
		if (strncmp(entry->d_name, "vd", 2) || !read_text(path, sectors, sizeof sectors)) continue;
		if (atoll(sectors) != STATUS_SECTORS) continue;
		snprintf(path, sizeof path, "/dev/%s", entry->d_name);
		fd = open(path, O_RDWR | O_CLOEXEC | O_SYNC);
	}
	if (directory) closedir(directory);
	return fd;
}

static void listen_on_vsock(void)
{
	struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_port = AGENT_PORT, .svm_cid = VMADDR_CID_ANY};
	listener = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (listener < 0) return;
	if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4)) abort();
}

/* The connection to go on with: `now`, or a new one. */
static int newest_connection(int now)
{
	int fd;
	while (listener >= 0 && (fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
		if (now >= 0) close(now);
		now = fd;
	}
	return now;
}
