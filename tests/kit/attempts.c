/* Attempts to get out of a container, one for each name in `table`; `attempts NAME [ARGUMENT...]`.
 *
 * Each line it prints is one try: "refused NAME: ERROR", or "THROUGH NAME" where it got what it should not. Exit status:
 * 0 when there were tries and all were refused, 1 when something got through, 2 for a mistake in the test itself.
 * Should a try succeed where it must not, it does no harm to the host. Only tests/live/test_isolation.py runs it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/reboot.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int tries, through;

/* One try. `result` is negative where it was refused, by errno. */
static long tried(const char *name, long result)
{
	tries++;
	if (result < 0) {
		printf("refused %s: %s\n", name, strerrorname_np(errno));
	} else {
		through++;
		printf("THROUGH %s\n", name);
	}
	fflush(stdout);
	return result;
}

static void must(const char *name, int holds)
{
	errno = 0;
	tries++;
	if (!holds)
		through++;
	printf("%s %s\n", holds ? "holds" : "THROUGH", name);
	fflush(stdout);
}

static void opened(const char *path, int flags)
{
	int fd = open(path, flags);

	if (tried(path, fd) >= 0)
		close(fd);
}

/* Opened for writing and no more: should it be allowed, the host is none the worse. */
static void written(const char *path)
{
	opened(path, O_WRONLY);
}

/* --- what is used up -------------------------------------------------------------------------------------------- */

static void fork_bomb(char **argv)
{
	int made = 0;
	pid_t pid;

	(void)argv;
	while ((pid = fork()) > 0)
		made++;
	if (pid == 0) { /* each child bombs, too */
		for (;;)
			if (fork() < 0)
				sched_yield();
	}
	tried("one more process", pid);
	printf("limit after %d\n", made);
	fflush(stdout);
	for (;;)
		pause();
}

static void memory_bomb(char **argv)
{
	(void)argv;
	for (long mib = 1;; mib++) {
		char *some = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (some == MAP_FAILED)
			exit(2);
		memset(some, 1, 1 << 20);
		if (mib > 1024) {
			must("more memory than it has", 0);
			return;
		}
	}
}

static void fill(char **argv)
{
	static char block[1 << 20];
	long mib = 0;
	int fd = open(argv[0], O_CREAT | O_WRONLY, 0600);

	memset(block, 7, sizeof block);
	while (mib < 256 && write(fd, block, sizeof block) == sizeof block)
		mib++;
	if (mib == 256)
		must("256 MiB", 0);
	else
		tried("one more block", write(fd, block, sizeof block) > 0 ? 0 : -1);
	printf("wrote %ld MiB\n", mib);
}

/* LATER NOW: until it is ended. One process writes and reads past the kernel's memory, the other into it. */
static void flood(char **argv)
{
	static char block[1 << 20] __attribute__((aligned(4096)));
	int by_hand = fork() == 0;
	int fd = open(argv[by_hand], O_CREAT | O_RDWR | (by_hand ? O_DIRECT : 0), 0600);

	must(argv[by_hand], fd >= 0);
	printf("floods %s\n", argv[by_hand]);
	fflush(stdout);
	for (long at = 0;; at = (at + 1) % 8) {
		pwrite(fd, block, sizeof block, at << 20);
		if (by_hand)
			pread(fd, block, sizeof block, at << 20);
	}
}

static void descriptors(char **argv)
{
	long most = 1 << 20, made = 0;

	(void)argv;
	while (made < most && dup(0) >= 0)
		made++;
	tried("one more descriptor", made == most ? 0 : -1);
	printf("limit after %ld\n", made);
}

/* --- network ------------------------------------------------------------------------------------------------------ */

static void raw_sockets(char **argv)
{
	(void)argv;
	tried("raw IPv4", socket(AF_INET, SOCK_RAW, IPPROTO_RAW));
	tried("raw ICMP", socket(AF_INET, SOCK_RAW, IPPROTO_ICMP));
	tried("raw IPv6", socket(AF_INET6, SOCK_RAW, IPPROTO_ICMPV6));
}

static void packet_sockets(char **argv)
{
	(void)argv;
	tried("packet", socket(AF_PACKET, SOCK_RAW, htons(3)));
	tried("cooked packet", socket(AF_PACKET, SOCK_DGRAM, htons(3)));
	tried("vsock", socket(40, SOCK_STREAM, 0));
	tried("kernel ciphers", socket(38, SOCK_SEQPACKET, 0));
}

/* ADDRESS: another machine's */
static void spoofing(char **argv)
{
	struct sockaddr_in6 other = {.sin6_family = AF_INET6};
	struct {
		struct in6_addr address;
		unsigned prefix;
		int index;
	} request = {.prefix = 128, .index = (int)if_nametoindex("eth0")};
	struct ifreq link = {.ifr_name = "eth0"};
	int fd = socket(AF_INET6, SOCK_DGRAM, 0), on = 1;

	inet_pton(AF_INET6, argv[0], &other.sin6_addr);
	request.address = other.sin6_addr;
	if (!request.index)
		exit(2);
	tried("bind", bind(fd, (struct sockaddr *)&other, sizeof other));
	tried("transparent", setsockopt(fd, IPPROTO_IPV6, 75, &on, sizeof on));
	tried("add an address", ioctl(fd, SIOCSIFADDR, &request));
	tried("take the interface down", ioctl(fd, SIOCSIFFLAGS, &link));
	link.ifr_hwaddr.sa_family = 1;
	tried("change the hardware address", ioctl(fd, SIOCSIFHWADDR, &link));
}

static int connects(const char *address, int port)
{
	struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons((unsigned short)port)};
	struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
	struct timeval patience = {.tv_usec = 300000};
	int is_six = strchr(address, ':') != NULL;
	int fd = socket(is_six ? AF_INET6 : AF_INET, SOCK_STREAM, 0);

	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
	if (inet_pton(is_six ? AF_INET6 : AF_INET, address, is_six ? (void *)&six.sin6_addr : (void *)&four.sin_addr) != 1)
		exit(2);
	return is_six ? connect(fd, (struct sockaddr *)&six, sizeof six) : connect(fd, (struct sockaddr *)&four, sizeof four);
}

/* PORT ADDRESS... */
static void reach(char **argv)
{
	for (int i = 1; argv[i]; i++)
		tried(argv[i], connects(argv[i], atoi(argv[0])));
}

/* PORT ADDRESS: as many as go */
static void connections(char **argv)
{
	int made = 0;

	while (made < 1000 && connects(argv[1], atoi(argv[0])) >= 0)
		made++;
	tried("one more connection", made == 1000 ? 0 : -1);
	printf("made %d\n", made);
}

/* NAME: an abstract socket of the host */
static void abstract_socket(char **argv)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	strcpy(name.sun_path + 1, argv[0]);
	tried("connect",
	      connect(fd, (struct sockaddr *)&name, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(argv[0]))));
}

/* --- files -------------------------------------------------------------------------------------------------------- */

/* SECRET: the path of a file of the host */
static void host_files(char **argv)
{
	static const char *ways[] = {"", "/proc/1/root", "/proc/1/cwd", "/proc/self/root", "/../../../../../..", "/proc/self/cwd"};
	char path[8192];

	for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
		snprintf(path, sizeof path, "%s%s", ways[i], argv[0]);
		opened(path, O_RDONLY);
	}
	for (int fd = 0; fd < 64; fd++) { /* a descriptor of the host's that was left open */
		snprintf(path, sizeof path, "/proc/self/fd/%d/..%s", fd, argv[0]);
		if (access(path, F_OK) == 0)
			must(path, 0);
	}
}

/* SECRET; out of a root by a root inside it */
static void chroot_escape(char **argv)
{
	int up = open("/", O_RDONLY | O_DIRECTORY);

	mkdir("/tmp/inner", 0755);
	if (chroot("/tmp/inner") == 0 && fchdir(up) == 0) {
		for (int i = 0; i < 64; i++)
			if (chdir("..") < 0)
				break;
		if (chroot(".") < 0)
			exit(2);
	}
	opened(argv[0], O_RDONLY);
}

static void by_handle(char **argv)
{
	struct {
		struct file_handle header;
		unsigned char bytes[128];
	} handle = {.header.handle_bytes = 128};
	int mount_id, root = open("/", O_RDONLY);

	(void)argv;
	if (name_to_handle_at(AT_FDCWD, "/", &handle.header, &mount_id, 0) < 0)
		handle.header = (struct file_handle){.handle_bytes = 8, .handle_type = 1};
	tried("open_by_handle_at", open_by_handle_at(root, &handle.header, O_RDONLY));
}

static void devices(char **argv)
{
	static const struct { const char *name; mode_t kind; unsigned major, minor; } nodes[] = {
		{"/tmp/mem", S_IFCHR, 1, 1}, {"/tmp/kmsg", S_IFCHR, 1, 11}, {"/tmp/vda", S_IFBLK, 254, 0},
		{"/tmp/vdb", S_IFBLK, 253, 0}, {"/tmp/sda", S_IFBLK, 8, 0}, {"/tmp/kvm", S_IFCHR, 10, 232},
		{"/tmp/tun", S_IFCHR, 10, 200}, {"/tmp/loop", S_IFCHR, 10, 237},
	};

	(void)argv;
	for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
		if (tried(nodes[i].name, mknod(nodes[i].name, nodes[i].kind | 0666, makedev(nodes[i].major, nodes[i].minor))) == 0)
			opened(nodes[i].name, O_RDONLY);
	}
	opened("/dev/mem", O_RDONLY);
	opened("/dev/kmsg", O_RDONLY);
	opened("/dev/loop-control", O_RDWR);
	opened("/dev/vda", O_RDONLY);
}

/* The image has /dev-in-image/null-like nodes: they open nothing. PATH... */
static void image_devices(char **argv)
{
	for (; *argv; argv++)
		opened(*argv, O_RDONLY);
}

static void kernel_files(char **argv)
{
	char byte;
	int fd = open("/proc/kcore", O_RDONLY);

	(void)argv;
	tried("/proc/kcore", fd < 0 || read(fd, &byte, 1) <= 0 ? -1 : 0);
	written("/proc/sysrq-trigger");
	fd = open("/proc/keys", O_RDONLY);
	must("/proc/keys is empty", fd < 0 || read(fd, &byte, 1) <= 0);
	fd = open("/proc/timer_list", O_RDONLY);
	must("/proc/timer_list is empty", fd < 0 || read(fd, &byte, 1) <= 0);
	written("/proc/irq/default_smp_affinity");
}

static void sysctls(char **argv)
{
	(void)argv;
	written("/proc/sys/kernel/core_pattern");
	written("/proc/sys/kernel/modprobe");
	written("/proc/sys/kernel/hostname");
	written("/proc/sys/kernel/panic");
	written("/proc/sys/vm/overcommit_memory");
	written("/proc/sys/vm/drop_caches");
	written("/proc/sys/net/ipv4/ip_forward");
	written("/proc/sys/fs/binfmt_misc/register");
}

static void sys_files(char **argv)
{
	(void)argv;
	written("/sys/kernel/mm/transparent_hugepage/enabled");
	written("/sys/power/state");
	written("/sys/kernel/uevent_helper");
	written("/sys/class/net/lo/mtu");
	written("/sys/module/kernel/parameters/panic");
	written("/sys/devices/system/cpu/cpu1/online");
}

static void control_groups(char **argv)
{
	static const char *controllers[] = {"memory", "cpu", "pids", "devices", "freezer", ""};
	static const char *files[] = {"memory.limit_in_bytes", "memory.max", "pids.max", "cpu.shares", "devices.allow",
		"release_agent", "notify_on_release", "cgroup.procs"};
	char path[256];

	(void)argv;
	for (size_t i = 0; i < sizeof controllers / sizeof *controllers; i++) {
		for (size_t j = 0; j < sizeof files / sizeof *files; j++) {
			snprintf(path, sizeof path, "/sys/fs/cgroup/%s/%s", controllers[i], files[j]);
			written(path);
		}
		snprintf(path, sizeof path, "/sys/fs/cgroup/%s/mine/deeper", controllers[i]);
		tried(path, mkdir(path, 0755));
	}
	mkdir("/tmp/cg", 0755);
	tried("mount cgroup", mount("cgroup", "/tmp/cg", "cgroup", 0, "memory"));
	tried("mount cgroup2", mount("cgroup2", "/tmp/cg", "cgroup2", 0, NULL));
}

static void mounts(char **argv)
{
	(void)argv;
	mkdir("/tmp/m", 0755);
	tried("tmpfs", mount("none", "/tmp/m", "tmpfs", 0, NULL));
	tried("proc", mount("none", "/tmp/m", "proc", 0, NULL));
	tried("sysfs", mount("none", "/tmp/m", "sysfs", 0, NULL));
	tried("bind", mount("/", "/tmp/m", NULL, MS_BIND | MS_REC, NULL));
	tried("overlay", mount("none", "/tmp/m", "overlay", 0, "lowerdir=/:/bin"));
	tried("debugfs", mount("none", "/tmp/m", "debugfs", 0, NULL));
	tried("devtmpfs", mount("none", "/tmp/m", "devtmpfs", 0, NULL));
	tried("fsopen", syscall(SYS_fsopen, "tmpfs", 0));
	tried("open_tree", syscall(SYS_open_tree, AT_FDCWD, "/", 1));
	tried("pivot_root", syscall(SYS_pivot_root, "/", "/tmp/m"));
}

static void remounts(char **argv)
{
	(void)argv;
	tried("/proc/sys", mount(NULL, "/proc/sys", NULL, MS_REMOUNT | MS_BIND, NULL));
	tried("/sys", mount(NULL, "/sys", NULL, MS_REMOUNT, NULL));
	tried("/sys/fs/cgroup", mount(NULL, "/sys/fs/cgroup", NULL, MS_REMOUNT, NULL));
	tried("what hides /proc/keys", umount2("/proc/keys", MNT_DETACH));
	tried("what hides /proc/sys", umount2("/proc/sys", MNT_DETACH));
	tried("the init", umount2("/dev/.hawker-init", MNT_DETACH));
	tried("propagation", mount(NULL, "/", NULL, MS_SHARED | MS_REC, NULL));
	written("/dev/.hawker-init");
	tried("remove the init", unlink("/dev/.hawker-init"));
}

/* --- processes ---------------------------------------------------------------------------------------------------- */

/* PID...: of the host and of a neighbour, as the host numbers them */
static void host_processes(char **argv)
{
	char path[64];

	for (; *argv; argv++) {
		pid_t pid = atoi(*argv);

		tried("kill", kill(pid, 0));
		tried("ptrace", ptrace(PTRACE_ATTACH, pid, 0, 0));
		tried("pidfd_open", syscall(SYS_pidfd_open, pid, 0));
		snprintf(path, sizeof path, "/proc/%d/status", pid);
		opened(path, O_RDONLY);
	}
	for (pid_t pid = 3; pid < 400; pid++) /* its own are 1 and 2, 3 at most where the runtime took a number */
		if (pid != getpid() && kill(pid, 0) == 0)
			must("sees another's process", 0);
	kill(-1, SIGTERM);
}

static void init(char **argv)
{
	(void)argv;
	opened("/proc/1/fd/3", O_WRONLY);
	opened("/proc/1/mem", O_RDWR);
	opened("/proc/1/environ", O_RDONLY);
	tried("ptrace", ptrace(PTRACE_ATTACH, 1, 0, 0));
	kill(1, SIGKILL);
	kill(1, SIGSTOP);
	must("the init lives on", kill(1, 0) == 0);
}

static void namespaces(char **argv)
{
	static const struct { const char *name; long flag; } kinds[] = {
		{"user", CLONE_NEWUSER}, {"mount", CLONE_NEWNS}, {"pid", CLONE_NEWPID}, {"net", CLONE_NEWNET},
		{"ipc", CLONE_NEWIPC}, {"uts", CLONE_NEWUTS}, {"cgroup", CLONE_NEWCGROUP}, {"time", 0x80},
	};
	struct { unsigned long long flags, rest[10]; } three = {.flags = CLONE_NEWUSER};
	char name[64], path[64];

	(void)argv;
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
		long made;

		snprintf(name, sizeof name, "unshare %s", kinds[i].name);
		tried(name, syscall(SYS_unshare, kinds[i].flag));
		if (kinds[i].flag == 0x80)
			continue;
		snprintf(name, sizeof name, "clone %s", kinds[i].name);
		made = syscall(SYS_clone, kinds[i].flag | SIGCHLD, 0, 0, 0, 0);
		if (made == 0)
			_exit(0);
		tried(name, made);
	}
	{
		long made = syscall(SYS_clone3, &three, 64);

		if (made == 0)
			_exit(0);
		tried("clone3", made);
	}
	for (size_t i = 0; i < 7; i++) {
		int fd;

		snprintf(path, sizeof path, "/proc/self/ns/%s", i == 1 ? "mnt" : kinds[i].name);
		fd = open(path, O_RDONLY);
		snprintf(name, sizeof name, "setns %s", kinds[i].name);
		tried(name, setns(fd, 0));
	}
	opened("/proc/1/ns/mnt", O_RDONLY);
}

/* run as an ordinary user; PROGRAM is owned by root and has the set-user-id bit, and prints its user */
static void suid(char **argv)
{
	int ends[2], status;
	char text[64] = "";
	pid_t pid;

	if (pipe(ends) < 0 || geteuid() == 0)
		exit(2);
	pid = fork();
	if (pid == 0) {
		dup2(ends[1], 1);
		execl(argv[0], argv[0], "user", NULL);
		_exit(3);
	}
	waitpid(pid, &status, 0);
	if (read(ends[0], text, sizeof text - 1) < 0 || status)
		exit(2);
	must("stays who it is", atoi(text) == (int)getuid());
	tried("setuid", setuid(0));
	tried("chown", chown("/bin/busybox", getuid(), getuid()));
	tried("write a program", open("/bin/busybox", O_WRONLY));
}

/* PORT: what a neighbour does meanwhile; everybody who connects is told "alive" */
static void neighbour(char **argv)
{
	struct sockaddr_in6 here = {.sin6_family = AF_INET6, .sin6_port = htons((unsigned short)atoi(argv[0]))};
	int fd = socket(AF_INET6, SOCK_STREAM, 0), on = 1;

	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	if (bind(fd, (struct sockaddr *)&here, sizeof here) < 0 || listen(fd, 64) < 0)
		exit(2);
	for (;;) {
		int one = accept(fd, NULL, NULL);

		if (one < 0 || write(one, "alive", 5) != 5)
			exit(2);
		close(one);
	}
}

static void user(char **argv)
{
	(void)argv;
	printf("%d\n", (int)geteuid());
	exit(0);
}

/* --- the kernel --------------------------------------------------------------------------------------------------- */

static void modules(char **argv)
{
	int fd = open("/bin/busybox", O_RDONLY);

	(void)argv;
	tried("init_module", syscall(SYS_init_module, "x", 1UL, ""));
	tried("finit_module", syscall(SYS_finit_module, fd, "", 0));
	tried("delete_module", syscall(SYS_delete_module, "no-such-module", O_NONBLOCK));
}

static void bpf(char **argv)
{
	char attributes[128] = {1, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 1, 0, 0, 0}; /* an array of one */

	(void)argv;
	tried("a map", syscall(SYS_bpf, 0, attributes, sizeof attributes));
	tried("the first program", syscall(SYS_bpf, 11, attributes, sizeof attributes));
}

static void perf(char **argv)
{
	unsigned attributes[32] = {1, 128}; /* software, size */

	(void)argv;
	tried("itself", syscall(SYS_perf_event_open, attributes, 0, -1, -1, 0));
	tried("a cpu", syscall(SYS_perf_event_open, attributes, -1, 0, -1, 0));
}

static void keys(char **argv)
{
	(void)argv;
	tried("add_key", syscall(SYS_add_key, "user", "mine", "x", 1UL, -3));
	tried("keyctl", syscall(SYS_keyctl, 0, -3, 1));
	tried("request_key", syscall(SYS_request_key, "user", "mine", NULL, 0));
}

static void kexec(char **argv)
{
	(void)argv;
	tried("kexec_load", syscall(SYS_kexec_load, 0UL, 0UL, NULL, 0UL));
	tried("kexec_file_load", syscall(SYS_kexec_file_load, -1, -1, 0UL, "", 0UL));
}

static void restart(char **argv)
{
	(void)argv;
	tried("control-alt-delete", reboot(LINUX_REBOOT_CMD_CAD_OFF));
	tried("nothing", syscall(SYS_reboot, 0, 0, 0, NULL)); /* EINVAL from a kernel that would */
}

static void clocks(char **argv)
{
	struct timeval now;
	struct timespec then;
	struct timex change = {0};

	(void)argv;
	gettimeofday(&now, NULL); /* as it is, so that nothing happens should it be allowed */
	clock_gettime(CLOCK_REALTIME, &then);
	adjtimex(&change);
	change.modes = ADJ_FREQUENCY;
	tried("settimeofday", syscall(SYS_settimeofday, &now, NULL));
	tried("clock_settime", syscall(SYS_clock_settime, CLOCK_REALTIME, &then));
	tried("adjtimex", adjtimex(&change));
	tried("clock_adjtime", clock_adjtime(CLOCK_REALTIME, &change));
}

static void names(char **argv)
{
	(void)argv;
	tried("sethostname", sethostname("owned", 5));
	tried("setdomainname", setdomainname("owned", 5));
}

static void rings(char **argv)
{
	char parameters[256] = "";

	(void)argv;
	tried("io_uring_setup", syscall(425, 1, parameters));
	tried("io_uring_register", syscall(427, -1, 0, NULL, 0));
	tried("io_uring_enter", syscall(426, -1, 0, 0, 0, NULL, 0));
}

static void faults(char **argv)
{
	(void)argv;
	tried("userfaultfd", syscall(SYS_userfaultfd, 1));
	tried("fanotify", syscall(SYS_fanotify_init, 0, 0));
	tried("syslog", syscall(SYS_syslog, 3, (char[16]){0}, 16));
	tried("quotas", syscall(SYS_quotactl, 0x800007 << 8, "/dev/vda", 0, NULL));
	tried("swap", syscall(SYS_swapoff, "/swap"));
	tried("accounting", syscall(SYS_acct, NULL));
	tried("no randomization", syscall(SYS_personality, 0x0040000));
#ifdef __x86_64__
	tried("ports", syscall(SYS_iopl, 3));
	tried("segments", syscall(SYS_modify_ldt, 0, NULL, 0UL));
#endif
}

/* By the entry for 32-bit programs; getpid. */
static void other_entry(char **argv)
{
#ifdef __x86_64__
	int status;
	pid_t pid = fork();

	if (pid == 0) {
		long result;

		__asm__ volatile("int $0x80" : "=a"(result) : "a"(20L) : "memory");
		_exit(result > 0 ? 0 : 1);
	}
	waitpid(pid, &status, 0);
	must("killed for it", WIFSIGNALED(status));
#else
	must("there is none", 1);
#endif
	(void)argv;
}

/* What is the container's own works: the same program finds its way where nothing is in it. Prints as the rest do. */
static void capabilities(char **argv)
{
	static const int wanted[] = {0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31};
	int found = 0;

	(void)argv;
	for (int cap = 0; cap < 64; cap++) {
		int has = prctl(PR_CAPBSET_READ, cap) == 1, may = 0;

		for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
			may |= wanted[i] == cap;
		if (has && !may)
			must("a capability too many", 0);
		found += has;
	}
	must("has some", found > 0);
	must("no new privileges", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1);
	must("filtered", prctl(PR_GET_SECCOMP) == 2);
	tried("a new capability", prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, 21, 0, 0));
}

static const struct { const char *name; void (*run)(char **); } table[] = {
	{"fork-bomb", fork_bomb}, {"memory-bomb", memory_bomb}, {"fill", fill}, {"flood", flood},
	{"descriptors", descriptors},
	{"raw-sockets", raw_sockets}, {"packet-sockets", packet_sockets}, {"spoofing", spoofing}, {"reach", reach},
	{"connections", connections},
	{"abstract-socket", abstract_socket}, {"host-files", host_files}, {"chroot-escape", chroot_escape},
	{"by-handle", by_handle}, {"devices", devices}, {"image-devices", image_devices}, {"kernel-files", kernel_files},
	{"sysctls", sysctls}, {"sys-files", sys_files}, {"control-groups", control_groups}, {"mounts", mounts},
	{"remounts", remounts}, {"host-processes", host_processes}, {"init", init}, {"namespaces", namespaces},
	{"suid", suid}, {"neighbour", neighbour}, {"user", user}, {"modules", modules}, {"bpf", bpf}, {"perf", perf}, {"keys", keys},
	{"kexec", kexec}, {"restart", restart}, {"clocks", clocks}, {"names", names}, {"rings", rings},
	{"faults", faults}, {"other-entry", other_entry}, {"capabilities", capabilities},
};

int main(int argc, char **argv)
{
	for (size_t i = 0; argc > 1 && i < sizeof table / sizeof *table; i++)
		if (strcmp(argv[1], table[i].name) == 0) {
			table[i].run(argv + 2);
			return tries == 0 ? 2 : through > 0;
		}
	return 2;
}
