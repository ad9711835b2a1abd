/* An HTTP server as small as they come, on the loopback port that it is given: one answer for each connection. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const char answer[] = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n";

int main(int count, char **words)
{
    int yes = 1;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(count > 1 ? atoi(words[1]) : 8080)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 1024))
        return 1;
    for (;;) {
        char request[4096];
        size_t held = 0;
        ssize_t got;
        int client = accept(listener, NULL, NULL);
        while (client >= 0 && held < sizeof request - 1 && (got = read(client, request + held, sizeof request - 1 - held)) > 0) {
            request[held += got] = 0;
            if (strstr(request, "\r\n\r\n")) {
                if (write(client, answer, sizeof answer - 1) < 0)
                    break;
                shutdown(client, SHUT_WR);
            }
        }
        close(client);
    }
}
