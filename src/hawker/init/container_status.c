/* What the init of a container tells about its program: a line of JSON, written at once. It does without stdio, which
 * would be most of the executable.
 */
#define MAX_TEXT 512

static int status_fd = -1; /* -1: nobody wants to be told */

struct text {
	size_t length;
	char bytes[MAX_TEXT];
};

static void add(struct text *to, const char *from)
{
	while (*from && to->length < sizeof to->bytes)
		to->bytes[to->length++] = *from++;
}

static void add_number(struct text *to, unsigned long number)
{
	char digits[24], *at = digits + sizeof digits;

	*--at = 0;
	do
		*--at = (char)('0' + number % 10);
	while (number /= 10);
	add(to, at);
}

/* As inside a JSON string. Bytes that are not ASCII become "?": the reader must be able to decode every line. */
static void add_escaped(struct text *to, const char *from, size_t length)
{
	char one[2] = "";

	for (size_t i = 0; i < length; i++) {
		if (from[i] == '"' || from[i] == '\\')
			add(to, "\\");
		one[0] = from[i];
		if (from[i] < 0x20 || from[i] == 0x7f)
			one[0] = '?';
		add(to, one);
	}
}

static void tell(struct text *line)
{
	static const struct timespec now;
	sigset_t broken;

	if (status_fd < 0)
		return;
	add(line, "\n");
	if (write(status_fd, line->bytes, line->length) < 0 && errno == EPIPE) {
		sigemptyset(&broken); /* nobody listens any more: the signal about it is not the program's */
		sigaddset(&broken, SIGPIPE);
		sigtimedwait(&broken, NULL, &now);
	}
}

static int tell_number(const char *name, unsigned long number)
{
	struct text line = {0};

	add(&line, "{\"");
	add(&line, name);
	add(&line, "\": ");
	add_number(&line, number);
	add(&line, "}");
	tell(&line);
	return (int)number;
}
