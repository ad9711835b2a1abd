/* Frames between a guest and its host, over a stream that either side may find cut off in the middle.
 *
 * A frame is [u32 length of the rest][u8 kind][u32 id][payload], little-endian, written as SLIP does (RFC 1055): END
 * after it, END and ESC inside replaced by two bytes. A frame whose length is not what it says is dropped: it is what a
 * daemon left that died while it wrote. A new session begins with END and a hello. Payloads are bytes as they are, or
 * fields, each [u32 length][bytes]; numbers in fields are decimal text.
 */
enum { END = 0xC0, ESC = 0xDB, ESC_END = 0xDC, ESC_ESC = 0xDD };
enum { FRAME_MAX = 1 << 20, READ_SIZE = 65536 };

struct bytes {
	uint8_t *data;
	size_t length, room;
};

struct decoder {
	struct bytes frame;
	bool escaped, too_long;
};

struct field {
	const uint8_t *data;
	size_t length;
};

struct reader {
	const uint8_t *at, *end;
};

static void append(struct bytes *to, const void *data, size_t length)
{
	if (to->length + length > to->room) {
		to->room = (to->length + length) * 2;
		to->data = realloc(to->data, to->room);
		if (!to->data) abort(); /* the kernel panics, the host sees the machine end */
	}
	if (length) memcpy(to->data + to->length, data, length);
	to->length += length;
}

static void drop(struct bytes *from, size_t length)
{
	from->length -= length;
	memmove(from->data, from->data + length, from->length);
}

static void append_field(struct bytes *to, const void *data, size_t length)
{
	uint32_t prefix = (uint32_t)length;
	append(to, &prefix, 4);
	append(to, data, length);
}

static void append_escaped(struct bytes *to, const uint8_t *data, size_t length)
{
	for (size_t i = 0; i < length; i++) {
		if (data[i] == END)
			append(to, (uint8_t[]){ESC, ESC_END}, 2);
		else if (data[i] == ESC)
			append(to, (uint8_t[]){ESC, ESC_ESC}, 2);
		else
			append(to, data + i, 1);
	}
}

static void send_frame(struct bytes *to, uint8_t kind, uint32_t id, const void *payload, size_t length)
{
	uint8_t head[9];
	uint32_t rest = (uint32_t)length + 5;
	memcpy(head, &rest, 4);
	head[4] = kind;
	memcpy(head + 5, &id, 4);
	append_escaped(to, head, sizeof head);
	append_escaped(to, payload, length);
	append(to, (uint8_t[]){END}, 1);
}

static void send_text(struct bytes *to, uint8_t kind, uint32_t id, const char *text)
{
	send_frame(to, kind, id, text, strlen(text));
}

/* Write what can be written now. */
static void flush(int fd, struct bytes *from)
{
	size_t done = 0;
	while (done < from->length) {
		ssize_t n = write(fd, from->data + done, from->length - done < 32768 ? from->length - done : 32768);
		if (n <= 0) break;
		done += n;
	}
	drop(from, done);
}

static void decode(struct decoder *decoder, uint8_t byte, void (*handle)(uint8_t, uint32_t, const uint8_t *, size_t))
{
	struct bytes *frame = &decoder->frame;
	if (byte == END) {
		uint32_t rest = 0, id;
		if (frame->length >= 9) memcpy(&rest, frame->data, 4);
		if (!decoder->too_long && !decoder->escaped && frame->length >= 9 && rest == frame->length - 4) {
			memcpy(&id, frame->data + 5, 4);
			handle(frame->data[4], id, frame->data + 9, frame->length - 9);
		}
		frame->length = 0;
		decoder->escaped = decoder->too_long = false;
		return;
	}
	if (byte == ESC && !decoder->escaped) {
		decoder->escaped = true;
		return;
	}
	if (decoder->escaped) byte = byte == ESC_END ? END : ESC;
	decoder->escaped = false;
	if (frame->length < FRAME_MAX)
		append(frame, &byte, 1);
	else
		decoder->too_long = true;
}

/* False when the other end is closed, or this one was never open. */
static bool read_frames(int fd, struct decoder *decoder, void (*handle)(uint8_t, uint32_t, const uint8_t *, size_t))
{
	static uint8_t buffer[READ_SIZE];
	ssize_t n;
	while ((n = read(fd, buffer, sizeof buffer)) > 0)
		for (ssize_t i = 0; i < n; i++)
			decode(decoder, buffer[i], handle);
	return n < 0 && (errno == EAGAIN || errno == EINTR);
}

/* The next field; empty, with `data` NULL, when there is none. */
static struct field next_field(struct reader *from)
{
	uint32_t length;
	if (from->end - from->at < 4) return (struct field){NULL, 0};
	memcpy(&length, from->at, 4);
	if ((size_t)(from->end - from->at) - 4 < length) return (struct field){NULL, 0};
	struct field found = {from->at + 4, length};
	from->at += 4 + length;
	return found;
}

/* Copies of fields. They stay until they are released, back to a mark, the number of those that were there before. */
static char **texts;
static size_t text_count;

static char *text_of(struct field field)
{
	char *text = malloc(field.length + 1);
	texts = realloc(texts, (text_count + 1) * sizeof *texts);
	if (!text || !texts) abort();
	texts[text_count++] = text;
	if (field.length) memcpy(text, field.data, field.length);
	text[field.length] = 0;
	return text;
}

static void release_texts(size_t mark)
{
	while (text_count > mark) free(texts[--text_count]);
}

static long long next_number(struct reader *from)
{
	char digits[24] = "";
	struct field field = next_field(from);
	if (field.data) memcpy(digits, field.data, field.length < 23 ? field.length : 23);
	return atoll(digits);
}
