"""Requests that go straight to where one like them was replayed."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from hawker.core.replay import Remember, Replay
from hawker.core.replay_cache import (
    DEPTH_MOST,
    Cache,
    Key,
    bypasses,
    keys_of,
    prefix_key,
    session_key,
    status_field,
)
from hawker.model.services import ReplayCache

ORD, AMS = Replay(regions=("ord",)), Replay(regions=("ams",))


def key(prefix: str, host: str = "example.com") -> Key:
    return "web", host, prefix, b""


def where(cache: Cache, path: str, host: str = "example.com", now: float = 0.0) -> Replay | None:
    found = cache.find(keys_of("web", host, path), now)
    return found.replay if found else None


def test_requests_below_a_prefix_go_where_the_first_was_replayed() -> None:
    cache = Cache()
    cache.keep(key("/some/path"), ORD, ttl_s=10, allow_bypass=False, now=0)
    assert where(cache, "/some/path") == where(cache, "/some/path/") == where(cache, "/some/path/x/y") == ORD
    assert where(cache, "/some/pathology") is None
    assert where(cache, "/some") is None
    assert where(cache, "/some/path", "other.example") is None
    assert cache.find(keys_of("other", "example.com", "/some/path"), 0.0) is None


def test_the_longest_prefix_counts() -> None:
    cache = Cache()
    cache.keep(key(""), ORD, ttl_s=10, allow_bypass=False, now=0)
    cache.keep(key("/a"), AMS, ttl_s=10, allow_bypass=False, now=0)
    assert (where(cache, "/"), where(cache, "/b"), where(cache, "/a/b")) == (ORD, ORD, AMS)


def test_what_is_kept_ends_with_its_time_or_when_it_is_told_to() -> None:
    cache = Cache()
    cache.keep(key("/a"), ORD, ttl_s=10, allow_bypass=False, now=5)
    assert where(cache, "/a", now=14.9) == ORD
    assert where(cache, "/a", now=15.0) is None
    assert len(cache) == 0
    cache.keep(key("/a"), ORD, ttl_s=10, allow_bypass=False, now=5)
    cache.forget(keys_of("web", "example.com", "/a/b"))
    assert where(cache, "/a") is None


def test_of_too_many_the_least_recently_used_goes() -> None:
    cache = Cache(most=2)
    for prefix in ("/a", "/b"):
        cache.keep(key(prefix), ORD, ttl_s=10, allow_bypass=False, now=0)
    assert where(cache, "/a") == ORD
    cache.keep(key("/c"), ORD, ttl_s=10, allow_bypass=False, now=0)
    assert [path for path in ("/a", "/b", "/c") if where(cache, path)] == ["/a", "/c"]


def test_an_app_decides_only_about_requests_like_the_one_it_answered() -> None:
    below = Remember(prefix="/a", ttl_s=10)
    assert prefix_key("web", "example.com", "/a/b", below) == key("/a")
    assert prefix_key("web", "example.com", "/a", below) == key("/a")
    assert prefix_key("web", "example.com", "/ab", below) is None
    elsewhere = Remember(prefix="/a", domain="other.example", ttl_s=10)
    assert prefix_key("web", "example.com", "/a/b", elsewhere) is None
    assert prefix_key("web", "other.example", "/a/b", elsewhere) == key("/a", "other.example")


def test_a_session_is_told_by_its_cookie_or_header() -> None:
    by_cookie = ReplayCache(path_prefix="/app", ttl_s=60, type="cookie", name="sid")
    by_header = ReplayCache(path_prefix="/app", ttl_s=60, type="header", name="x-session")
    fields = [(b"cookie", b"a=1; sid=7"), (b"x-session", b"7")]
    one = session_key("web", "h", "/app/x", fields, by_cookie)
    assert one == ("web", "h", "/app", b"cookie sid=7")
    assert session_key("web", "h", "/app/x", fields, by_header) == ("web", "h", "/app", b"header x-session=7")
    assert session_key("web", "h", "/other", fields, by_cookie) is None
    assert session_key("web", "h", "/apple", fields, by_cookie) is None
    assert session_key("web", "h", "/app", [(b"cookie", b"asid=7")], by_cookie) is None
    assert session_key("web", "h", "/app", [(b"cookie", b"sid=" + b"x" * 5000)], by_cookie) is None
    assert keys_of("web", "h", "/app/x", fields, [by_cookie])[0] == one
    cache = Cache()
    cache.keep(one, ORD, ttl_s=60, allow_bypass=True, now=0)
    found = cache.find(keys_of("web", "h", "/app/y", fields, [by_cookie]), 0)
    assert found is not None
    assert (found.replay, found.allow_bypass) == (ORD, True)
    assert cache.find(keys_of("web", "h", "/app/y", [(b"cookie", b"sid=8")], [by_cookie]), 0) is None


def test_of_several_rules_for_sessions_the_longest_path_counts_and_one_may_be_of_a_host() -> None:
    short, long = (ReplayCache(path_prefix=path, ttl_s=60, type="cookie", name="s") for path in ("/", "/api/"))
    fields = [(b"cookie", b"s=1")]
    assert [key[2] for key in keys_of("web", "h", "/api/x", fields, [short, long])][:2] == ["/api", ""]
    of_host = ReplayCache(path_prefix="api.example/v1", ttl_s=60, type="cookie", name="s")
    assert session_key("web", "api.example", "/v1/x", fields, of_host) == ("web", "api.example", "/v1", b"cookie s=1")
    assert session_key("web", "web.example", "/v1/x", fields, of_host) is None


def test_a_request_may_ask_to_pass_by_the_cache() -> None:
    assert bypasses([(b"fly-replay-cache-control", b" Skip ")])
    assert not bypasses([(b"fly-replay-cache-control", b"no"), (b"accept", b"skip")])
    assert status_field("bypass") == (b"fly-replay-cache-status", b"bypass")


@example("/a" * 100)
@given(st.lists(st.sampled_from(["", "a", "b", "a" * 9]), max_size=60).map(lambda parts: "/" + "/".join(parts)))
def test_a_path_has_few_keys_and_each_is_a_prefix_of_it(path: str) -> None:
    keys = keys_of("web", "h", path)
    assert len(keys) <= DEPTH_MOST
    assert keys[-1] == ("web", "h", "", b"")
    for _, _, prefix, _ in keys:
        assert path == prefix or path.startswith(f"{prefix}/")
    assert [len(prefix) for _, _, prefix, _ in keys] == sorted((len(key[2]) for key in keys), reverse=True)
