/* PID 1 of a microVM: boots it to the point where a program can run, is told which, runs it, and tells how it ended.
 *
 * The guest has four virtio ports. To `out` and `err` goes what the program writes; to `status` one line of JSON when it
 * has ended, {"code"}, {"signal"} or {"error"}, perhaps with "oom_killed"; then the machine is switched off. Over
 * `agent` the host's daemon asks for everything else; the frames are described in guest_wire.c, the requests below in
 * `handle`. Nothing is configured before `start` comes, and no disk is read, so that a guest may be snapshotted, idle,
 * and its copies each become another machine, with other disks. A hypervisor that has no such ports is served otherwise,
 * see guest_console.c.
 *
 * Compiled static; everything is in one process with one loop.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/netlink.h>
#include <linux/random.h>
#include <linux/rtnetlink.h>
#include <linux/vm_sockets.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "guest_wire.c"
#include "guest_files.c"
#include "guest_programs.c"
#include "guest_configuration.c"
#include "guest_commands.c"
#include "guest_figures.c"
#include "guest_console.c"

static const char *const PORTS[] = {"agent", "out", "err", "status"};
enum { AGENT, OUT, ERR, STATUS };

static int ports[4] = {-1, -1, -1, -1};
static struct bytes to_agent;     /* frames that wait to be written */
static struct decoder from_agent;
static struct pump output[2];     /* of the program: out, err */
static pid_t main_pid;
static int main_status;
static enum { IDLE, RUNNING, ENDING } state;
static struct bytes announced; /* of a configuration that is longer than a frame, what has come */

/* --- booting ----------------------------------------------------------------------------------------------------- */

static void mount_kernel_files(void)
{
	static const struct { const char *type, *path, *options; } MOUNTS[] = {
		{"devtmpfs", "/dev", "mode=755"},          {"proc", "/proc", ""},
		{"sysfs", "/sys", ""},                     {"devpts", "/dev/pts", "ptmxmode=666,gid=5,mode=620"},
		{"tmpfs", "/dev/shm", "mode=1777,size=50%"}, {"mqueue", "/dev/mqueue", ""},
		{"cgroup2", "/sys/fs/cgroup", ""},
	};
	static const struct { const char *to, *path; } LINKS[] = {
		{"/proc/self/fd", "/dev/fd"},       {"/proc/self/fd/0", "/dev/stdin"},
		{"/proc/self/fd/1", "/dev/stdout"}, {"/proc/self/fd/2", "/dev/stderr"},
	};
	for (size_t i = 0; i < sizeof MOUNTS / sizeof *MOUNTS; i++) {
		mkdir(MOUNTS[i].path, 0755);
		unsigned long flags = MS_NOSUID | MS_NOEXEC | (strncmp(MOUNTS[i].type, "dev", 3) ? MS_NODEV : 0);
		mount(MOUNTS[i].type, MOUNTS[i].path, MOUNTS[i].type, flags, MOUNTS[i].options);
	}
	for (size_t i = 0; i < sizeof LINKS / sizeof *LINKS; i++)
		if (symlink(LINKS[i].to, LINKS[i].path)) continue;
	int fd;
	while ((fd = open("/dev/null", O_RDWR)) >= 0 && fd < 2) continue; /* so that nothing else has these numbers */
	write_file("/proc/sys/vm/overcommit_memory", "1", 1, O_WRONLY); /* as on hosts of containers: used counts, not asked */
	write_file("/sys/fs/cgroup/cgroup.subtree_control", "+memory +pids", 13, O_WRONLY);
	mkdir(GROUP, 0755);
}

/* The list has files in order. */
static void load_modules(const char *list_path)
{
	FILE *list = fopen(list_path, "re");
	char line[256];
	while (list && fgets(line, sizeof line, list)) {
		line[strcspn(line, "\n")] = 0;
		int fd = open(line, O_RDONLY | O_CLOEXEC);
		if (fd < 0) continue;
		syscall(SYS_finit_module, fd, "", 0);
		close(fd);
		unlink(line); /* the memory is the machine's */
	}
	if (list) fclose(list);
}

static int open_port(const char *name)
{
	char path[300], found[64];
	DIR *directory = opendir("/sys/class/virtio-ports");
	struct dirent *entry;
	int fd = -1;
	while (directory && fd < 0 && (entry = readdir(directory))) {
		snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", entry->d_name);
		if (entry->d_name[0] == '.' || !read_text(path, found, sizeof found)) continue;
		found[strcspn(found, "\n")] = 0;
		if (strcmp(found, name)) continue;
		snprintf(path, sizeof path, "/dev/%s", entry->d_name);
		fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
	}
	if (directory) closedir(directory);
	return fd;
}

static void open_ports(void)
{
	bool serial = told("hawker.console=serial"), vsock = told("hawker.agent=vsock");
	if (serial) {
		ports[OUT] = ports[ERR] = open_serial();
		ports[STATUS] = open_status_drive();
	}
	if (vsock) listen_on_vsock();
	for (int i = 0; i < 4; i++) {
		if (i == AGENT ? vsock : serial) continue;
		for (int tries = 0; tries < 5000 && (ports[i] = open_port(PORTS[i])) < 0; tries++)
			usleep(1000);
	}
}

/* --- the end ----------------------------------------------------------------------------------------------------- */

static void power_off(void)
{
	sync();
	if (isatty(ports[OUT])) tcdrain(ports[OUT]);
	reboot(RB_AUTOBOOT); /* by a triple fault or as the command line has it, at which the hypervisor ends */
	for (;;) pause();
}

static void tell_status(const char *line)
{
	fcntl(ports[STATUS], F_SETFL, 0); /* returns once the host has taken it */
	if (write(ports[STATUS], line, strlen(line)) < 0) return;
}

static void tell_end(void)
{
	char line[100];
	const char *oom = number_after(GROUP "/memory.events", "oom_kill ") > 0 ? ", \"oom_killed\": true" : "";
	if (WIFEXITED(main_status))
		snprintf(line, sizeof line, "{\"code\": %d%s}\n", WEXITSTATUS(main_status), oom);
	else
		snprintf(line, sizeof line, "{\"signal\": %d%s}\n", WTERMSIG(main_status), oom);
	tell_status(line);
}

/* --- requests ---------------------------------------------------------------------------------------------------- */

static void start(uint32_t id, const uint8_t *payload, size_t length)
{
	char problem[600] = "";
	if (state == IDLE) {
		append(&announced, payload, length);
		struct reader fields = {announced.data, announced.data + announced.length};
		struct program *program = configure(&fields, problem, sizeof problem);
		if (!*problem) main_pid = spawn(program, GROUP, problem, sizeof problem);
		if (*problem) {
			char line[1300] = "{\"error\": \"";
			append_json(line, sizeof line - 4, problem);
			strcat(line, "\"}\n");
			tell_status(line);
			send_text(&to_agent, 'f', id, problem);
			for (int i = 0; i < 1000 && to_agent.length; i++) {
				flush(ports[AGENT], &to_agent);
				usleep(1000);
			}
			power_off();
		}
		if (program->input >= 0) close(program->input);
		output[0].from = program->output;
		output[1].from = program->error;
		state = RUNNING;
		free(announced.data);
	}
	send_text(&to_agent, 'r', id, "running");
}

/* h hello       a daemon is there: whatever one before it ran is killed -> r state
 * b before      a part of what `start` has, which comes with the rest; not answered
 * s start       configure the machine and run its program, once; see guest_configuration.c -> r "running"
 * g signal      number: to the program -> r
 * x execute     run a command beside the program; see guest_commands.c -> r, then its frames
 * i z t k c     for the command of this id: input, end of input, size of the terminal, kill, credit; not answered
 * n renew       clock in nanoseconds, random bytes -> r
 * q use         -> r lines of numbers
 * p processes   -> r
 * An answer is `r` with the id of its request, or `f` with the reason why not. */
static void handle(uint8_t kind, uint32_t id, const uint8_t *payload, size_t length)
{
	struct reader fields = {payload, payload + length};
	switch (kind) {
	case 'h':
		drop_commands();
		announced.length = to_agent.length = 0; /* was meant by another, and for another */
		send_text(&to_agent, 'r', id, state == IDLE ? "idle" : "running");
		break;
	case 'b':
		if (state == IDLE) append(&announced, payload, length);
		break;
	case 's':
		start(id, payload, length);
		break;
	case 'g': {
		int number = (int)next_number(&fields);
		if (state != RUNNING) {
			send_text(&to_agent, 'f', id, "the program does not run");
			break;
		}
		kill(main_pid, number);
		send_text(&to_agent, 'r', id, "");
		break;
	}
	case 'x':
		if (state == RUNNING)
			execute(&to_agent, id, &fields);
		else
			send_text(&to_agent, 'f', id, "the program does not run");
		break;
	case 'n': {
		struct field clock = next_field(&fields), seed = next_field(&fields);
		set_clock(clock);
		add_seed(seed);
		send_text(&to_agent, 'r', id, "");
		break;
	}
	case 'q':
		send_use(&to_agent, id);
		break;
	case 'p':
		send_processes(&to_agent, id);
		break;
	default:
		command_frame(kind, id, payload, length);
	}
}

/* What was begun with a connection ends with it. */
static void hang_up(void)
{
	drop_commands();
	to_agent.length = from_agent.frame.length = 0;
	from_agent.escaped = from_agent.too_long = false;
}

static void serve_agent(void)
{
	int fd = newest_connection(ports[AGENT]);
	if (fd != ports[AGENT]) hang_up(), ports[AGENT] = fd;
	bool open = read_frames(ports[AGENT], &from_agent, handle);
	if (listener >= 0 && !open && ports[AGENT] >= 0) {
		close(ports[AGENT]);
		ports[AGENT] = -1;
		hang_up();
	}
}

/* --- the loop ---------------------------------------------------------------------------------------------------- */

static void reap(void)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		if (pid == main_pid && state == RUNNING) {
			main_status = status;
			state = ENDING;
			write_file(GROUP "/cgroup.kill", "1", 1, O_WRONLY);
		} else {
			command_ended(pid, status);
		}
	}
}

static void woken(int number) { (void)number; }

int main(void)
{
	mount_kernel_files();
	load_modules("/modules");
	if (told("hawker.agent=vsock")) load_modules("/modules.vsock");
	open_ports();
	umask(022);

	sigset_t blocked, open_mask;
	sigfillset(&blocked);
	sigprocmask(SIG_BLOCK, &blocked, &open_mask);
	sigdelset(&open_mask, SIGCHLD);
	signal(SIGCHLD, woken);
	output[0].from = output[1].from = -1;

	for (;;) {
		struct pollfd polled[4 + 2 + 3 * COMMANDS_MAX];
		int count = 0;
		polled[count++] = (struct pollfd){ports[AGENT], POLLIN | (to_agent.length ? POLLOUT : 0), 0};
		polled[count++] = (struct pollfd){listener, POLLIN, 0};
		for (int i = 0; i < 2; i++) {
			polled[count++] = (struct pollfd){output[i].from, output[i].waiting.length ? 0 : POLLIN, 0};
			if (output[i].from >= 0 && output[i].waiting.length)
				polled[count++] = (struct pollfd){ports[OUT + i], POLLOUT, 0};
		}
		count += poll_commands(polled + count);
		/* A port whose other end is closed is always ready: look at it now and then, not all the time. */
		bool away = poll(polled, 1, 0) > 0 && polled[0].revents & POLLHUP && !(polled[0].revents & POLLIN);
		if (away) {
			drop_commands();
			polled[0].fd = -1;
		}
		struct timespec soon = {0, state == ENDING ? 1000000 : 20000000};
		ppoll(polled, count, away || state == ENDING ? &soon : NULL, &open_mask);
		reap();
		serve_agent();
		bool some = false;
		for (int i = 0; i < 2; i++)
			some |= pump(&output[i], ports[OUT + i]);
		serve_commands(&to_agent);
		flush(ports[AGENT], &to_agent);
		if (state == ENDING && !some && number_after(GROUP "/cgroup.events", "populated ") == 0) {
			for (int i = 0; i < 2; i++) /* what was written before the last process died */
				some |= pump(&output[i], ports[OUT + i]) || output[i].waiting.length;
			if (!some) {
				tell_end();
				power_off();
			}
		}
	}
}
