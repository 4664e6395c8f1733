"""The flags `coissue up` starts Ray with."""

from __future__ import annotations

from coissue.deployments import discovery


def test_no_two_clusters_share_a_fallback_proxy(monkeypatch):
    """They share the port silently, and while a replica is away either may answer for the other."""
    seen = []
    for _ in range(2):
        for name in (*discovery.SERVE_FLAGS, *discovery.HAPROXY_PORTS, *discovery.FALLBACK_PORTS):
            monkeypatch.delenv(name, raising=False)
        discovery.apply_serve_flags()
        seen.append([discovery.os.environ[name] for name in discovery.FALLBACK_PORTS])
    assert "8500" not in seen[0] + seen[1]
    assert "9500" not in seen[0] + seen[1]


def test_flags_of_the_user_win(monkeypatch):
    monkeypatch.setenv("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "12345")
    monkeypatch.setenv("RAY_worker_niceness", "5")
    discovery.apply_serve_flags()
    assert discovery.os.environ["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] == "12345"
    assert discovery.os.environ["RAY_worker_niceness"] == "5"
