/* PID 1 of a container: starts the program, forwards signals to it, reaps orphans, tells how it ended.
 *
 *   container [--status-fd N] [--root DIR] [--cwd DIR] [--user UID:GID[,GID...]] -- PROGRAM [ARGUMENT...]
 *
 * To descriptor N (never seen by the program) go lines of JSON, each written at once:
 *   {"started": PID}            the program runs (execve succeeded); PID as seen by the init
 *   {"error": "...", "code": C} it could not be started: 127 not found, 126 not executable; nothing ran; the last line
 *   {"code": C} or {"signal": S}  how the program ended; the last line
 * Exit status: the program's code, or 128 + signal, or 127, 126, or 125 for a failure of its own.
 */
