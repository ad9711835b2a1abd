/* Become another user for ever, as hawker/supervisor/users.py does: with these groups only, without the session's keys,
 * and gaining nothing by the programs that are run. -1: errno says why not. */
#include <errno.h>
#include <grp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define JOIN_SESSION_KEYRING 1 /* <linux/keyctl.h> */

static int become(uid_t user, gid_t group, size_t count, const gid_t *groups)
{
	if (setgroups(count, groups) < 0 || setresgid(group, group, group) < 0 || setresuid(user, user, user) < 0)
		return -1;
	if (syscall(SYS_keyctl, JOIN_SESSION_KEYRING, NULL) < 0 && errno != ENOSYS && errno != EPERM)
		return -1; /* where a filter of system calls forbids it, nobody has the keys */
	return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
}
