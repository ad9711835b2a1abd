/* Commands that run beside the program, each with the id of the request that asked for it.
 *
 * `x` has the fields of `start` that describe a program. To the guest: `i` input as it is, `z` no more will come,
 * `t` columns and rows, `k` kill it with all it started, `c` so many bytes more may be sent. From the guest: `o`, `e`
 * output as it is, `a` so many bytes of input were taken, and last `w` with "code" or "signal" and the number. A guest
 * sends no more than it has credit for, beginning with CREDIT, so that one reader who is slow holds up nobody else;
 * and a host holds back input that was not taken.
 */
enum { COMMANDS_MAX = 64, CREDIT = 256 * 1024 };

struct command {
	bool used, ended, input_ends;
	uint32_t id;
	pid_t pid;
	int status, input, output, error;
	long long credit;
	struct bytes waiting; /* input that its program has not read yet */
};

static struct command commands[COMMANDS_MAX];

static void command_group(char *path, size_t room, const struct command *command, const char *file)
{
	snprintf(path, room, GROUP "/command.%u%s", command->id, file);
}

static struct command *command_of(uint32_t id)
{
	for (int i = 0; i < COMMANDS_MAX; i++)
		if (commands[i].used && commands[i].id == id) return &commands[i];
	return NULL;
}

static void kill_command(const struct command *command)
{
	char path[100];
	command_group(path, sizeof path, command, "/cgroup.kill");
	write_file(path, "1", 1, O_WRONLY);
}

static void close_end(int *fd)
{
	if (*fd >= 0) close(*fd);
	*fd = -1;
}

static void forget_command(struct command *command)
{
	char path[100];
	close_end(&command->input), close_end(&command->output), close_end(&command->error);
	free(command->waiting.data);
	command_group(path, sizeof path, command, "");
	rmdir(path); /* what it left in the background keeps it */
	memset(command, 0, sizeof *command);
}

/* The daemon that asked for them is gone. */
static void drop_commands(void)
{
	for (int i = 0; i < COMMANDS_MAX; i++) {
		if (!commands[i].used) continue;
		kill_command(&commands[i]);
		forget_command(&commands[i]);
	}
}

static void execute(struct bytes *to_agent, uint32_t id, struct reader *fields)
{
	char problem[600] = "", path[100];
	size_t mark = text_count;
	struct command *command = NULL;
	for (int i = 0; i < COMMANDS_MAX && !command; i++)
		if (!commands[i].used) command = &commands[i];
	if (!command) {
		send_text(to_agent, 'f', id, "too many commands run at once");
		return;
	}
	command->id = id;
	command_group(path, sizeof path, command, "");
	mkdir(path, 0755);
	struct program *program = configure(fields, problem, sizeof problem);
	if (!*problem) command->pid = spawn(program, path, problem, sizeof problem);
	if (*problem) {
		rmdir(path);
		send_text(to_agent, 'f', id, problem);
	} else {
		command->used = true;
		command->credit = CREDIT;
		command->input = program->input, command->output = program->output, command->error = program->error;
		send_text(to_agent, 'r', id, "");
	}
	free(program);
	release_texts(mark);
}

static void command_ended(pid_t pid, int status)
{
	for (int i = 0; i < COMMANDS_MAX; i++)
		if (commands[i].used && commands[i].pid == pid) commands[i].ended = true, commands[i].status = status;
}

static void command_frame(uint8_t kind, uint32_t id, const uint8_t *payload, size_t length)
{
	struct command *command = command_of(id);
	struct reader fields = {payload, payload + length};
	if (!command) return;
	if (kind == 'i')
		append(&command->waiting, payload, length);
	else if (kind == 'z')
		command->input_ends = true;
	else if (kind == 'k')
		kill_command(command);
	else if (kind == 'c')
		command->credit += next_number(&fields);
	else if (kind == 't') {
		struct winsize size = {0};
		size.ws_col = (unsigned short)next_number(&fields);
		size.ws_row = (unsigned short)next_number(&fields);
		if (command->input >= 0) ioctl(command->input, TIOCSWINSZ, &size);
	}
}

static int poll_commands(struct pollfd *polled)
{
	int count = 0;
	for (int i = 0; i < COMMANDS_MAX; i++) {
		struct command *command = &commands[i];
		if (!command->used) continue;
		if (command->input >= 0 && command->waiting.length) polled[count++] = (struct pollfd){command->input, POLLOUT, 0};
		if (command->credit <= 0) continue;
		if (command->output >= 0) polled[count++] = (struct pollfd){command->output, POLLIN, 0};
		if (command->error >= 0) polled[count++] = (struct pollfd){command->error, POLLIN, 0};
	}
	return count;
}

static void take_input(struct bytes *to_agent, struct command *command)
{
	size_t before = command->waiting.length;
	if (command->input < 0) {
		command->waiting.length = 0;
	} else if (before) {
		flush(command->input, &command->waiting);
		if (command->waiting.length == before && errno != EAGAIN) { /* nobody reads it */
			command->waiting.length = 0;
			if (command->error >= 0) close_end(&command->input);
		}
	}
	if (command->waiting.length < before) {
		char taken[24];
		struct bytes payload = {0};
		snprintf(taken, sizeof taken, "%zu", before - command->waiting.length);
		append_field(&payload, taken, strlen(taken));
		send_frame(to_agent, 'a', command->id, payload.data, payload.length);
		free(payload.data);
	}
	if (command->input_ends && !command->waiting.length && command->input >= 0) {
		if (command->error < 0 && !command->ended) { /* a terminal ends its input by a character */
			if (write(command->input, "\004", 1) < 0) return;
			command->input_ends = false;
		} else {
			close_end(&command->input);
		}
	}
}

static void give_output(struct bytes *to_agent, struct command *command, int *from, uint8_t kind)
{
	static uint8_t buffer[32768];
	while (*from >= 0 && command->credit > 0) {
		size_t most = command->credit < (long long)sizeof buffer ? (size_t)command->credit : sizeof buffer;
		ssize_t n = read(*from, buffer, most);
		if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
		if (n <= 0) {
			close_end(from);
			return;
		}
		command->credit -= n;
		send_frame(to_agent, kind, command->id, buffer, n);
	}
}

static void serve_commands(struct bytes *to_agent)
{
	for (int i = 0; i < COMMANDS_MAX; i++) {
		struct command *command = &commands[i];
		if (!command->used) continue;
		bool ended = command->ended; /* seen before its output is read: nothing of its own comes after */
		take_input(to_agent, command);
		bool terminal = command->error < 0 && command->output >= 0;
		give_output(to_agent, command, &command->output, 'o');
		if (!terminal) give_output(to_agent, command, &command->error, 'e');
		if (!ended || command->credit <= 0) continue;
		struct bytes payload = {0};
		char number[24];
		bool exited = WIFEXITED(command->status);
		snprintf(number, sizeof number, "%d", exited ? WEXITSTATUS(command->status) : WTERMSIG(command->status));
		append_field(&payload, exited ? "code" : "signal", exited ? 4 : 6);
		append_field(&payload, number, strlen(number));
		send_frame(to_agent, 'w', command->id, payload.data, payload.length);
		free(payload.data);
		forget_command(command);
	}
}
