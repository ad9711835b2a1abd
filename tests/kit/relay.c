/* Process 1 of a guest in which the agent's vsock end is tried without a hypervisor that has one: what comes over the
 * virtio port `agent` is passed on to port 1 of the guest itself (vsock_loopback), and back; the real init goes on as
 * process 1. The stream breaks where a byte 0xFF comes, which no frame begins or ends with: then it connects anew. */
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int port(void)
{
	char path[32];
	for (;; usleep(1000))
		for (int i = 0; i < 10; i++) {
			snprintf(path, sizeof path, "/dev/vport%dp1", i);
			int fd = open(path, O_RDWR);
			if (fd >= 0) return fd;
		}
}

static int agent(void)
{
	struct sockaddr_vm address = {.svm_family = AF_VSOCK, .svm_port = 1, .svm_cid = 1};
	for (;; usleep(1000)) {
		int fd = socket(AF_VSOCK, SOCK_STREAM, 0);
		if (fd >= 0 && !connect(fd, (struct sockaddr *)&address, sizeof address)) return fd;
		if (fd >= 0) close(fd);
	}
}

int main(void)
{
	char bytes[4096];
	if (fork()) {
		execl("/guest-init", "/guest-init", (char *)0);
		return 1;
	}
	int ends[2] = {port(), agent()};
	for (;;) {
		struct pollfd polled[2] = {{ends[0], POLLIN, 0}, {ends[1], POLLIN, 0}};
		poll(polled, 2, -1);
		for (int i = 0; i < 2; i++) {
			if (!(polled[i].revents & POLLIN)) continue;
			ssize_t n = read(ends[i], bytes, sizeof bytes);
			if (n == 1 && !i && (unsigned char)*bytes == 0xFF) close(ends[1]), ends[1] = agent();
			else if (n > 0 && write(ends[!i], bytes, n) < 0) return 1;
		}
		if (polled[0].revents & POLLHUP && !(polled[0].revents & POLLIN)) usleep(5000);
	}
}
