"""What to change in which proxy, by what was measured.

Sources: the documentation of nginx (ngx_http_proxy_module, ngx_http_gzip_module), Caddy 2 (reverse_proxy, encode),
HAProxy 2.6 (timeouts, compression), Envoy (route timeouts, buffer and compressor filters), Traefik 3 (middlewares,
transports), and of the load balancers of AWS, Google Cloud and Azure, as known on 2026-11-27. nginx, HAProxy and
Caddy are run in tests/measure/test_path.py.
"""

from __future__ import annotations

from tailrace_outer.measure.path.probe import Found, Problem

__all__ = ["PROXIES", "settings_for"]

PROXIES = ("nginx", "Caddy", "HAProxy", "Envoy", "Traefik", "cloud balancers")

_SETTINGS: dict[Problem, tuple[str, ...]] = {
    "buffering": (
        "proxy_buffering off, and no proxy_ignore_headers X-Accel-Buffering",
        "reverse_proxy: flush_interval -1; no response_buffers",
        "no `option http-buffer-request`, and no filter that waits for whole answers",
        "no buffer filter on the route (envoy.filters.http.buffer)",
        "no buffering middleware on the router; responseForwarding.flushInterval of a millisecond",
        "AWS: an ALB instead of API Gateway; Cloudflare, Azure Front Door: no caching or buffering for the path",
    ),
    "compression": (
        "gzip_types without text/event-stream, or gzip off for the location",
        "encode with a matcher that leaves text/event-stream out",
        "compression type without text/event-stream",
        "compressor filter: content_type without text/event-stream",
        'compress middleware: excludedContentTypes = ["text/event-stream"]',
        "no compression for text/event-stream",
    ),
    "idle": (
        "proxy_read_timeout above --heartbeat-s, such as 1h",
        "transport http: response_header_timeout and read_timeout above --heartbeat-s, or unset",
        "timeout server and timeout client above --heartbeat-s, and timeout tunnel for WebSockets",
        "route: timeout 0s; stream_idle_timeout above --heartbeat-s",
        "respondingTimeouts.readTimeout and writeTimeout 0; forwardingTimeouts.idleConnTimeout above --heartbeat-s",
        "AWS ALB: idle timeout; Google: backend service timeout, above the time of a whole stream",
    ),
    "silence": (
        "proxy_read_timeout longer than the longest answer without streaming",
        "transport http: response_header_timeout longer than the longest answer without streaming",
        "timeout server longer than the longest answer without streaming",
        "route: timeout longer than the longest answer without streaming, or 0s",
        "serversTransport: forwardingTimeouts.responseHeaderTimeout longer than the longest answer without streaming",
        "idle timeout (AWS ALB: 60 s) or backend service timeout (Google: 30 s) longer than the longest answer",
    ),
    "body": (
        "client_max_body_size 20m, as --image-body-bytes",
        "request_body: max_size 20MB, or no such directive",
        "no rule that denies by req.body_size or req.hdrs_length",
        "buffer filter: max_request_bytes 20000000",
        "buffering middleware: maxRequestBodyBytes 20000000",
        "AWS WAF and API Gateway limit bodies (8 kB inspected, 10 MB): raise it for the path",
    ),
    "keep_alive": (
        "upstream: keepalive_timeout below the server's --keep-alive-s (90 s)",
        "transport http: keepalive below the server's --keep-alive-s (90 s)",
        "timeout http-keep-alive and `http-reuse safe`; pool-purge-delay below the server's --keep-alive-s (90 s)",
        "cluster: idle_timeout below the server's --keep-alive-s (90 s)",
        "serversTransport: forwardingTimeouts.idleConnTimeout below the server's --keep-alive-s (90 s)",
        "Google's keep connections 600 s: tailrace serve --keep-alive-s 620",
    ),
    "websocket": (
        "proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade and Connection upgrade",
        "reverse_proxy passes them by itself; no header_up that removes Connection or Upgrade",
        "no http-request del-header Upgrade; timeout tunnel 1h",
        "upgrade_configs: [{upgrade_type: websocket}]",
        "no headers middleware that removes Upgrade or Connection",
        "AWS: an ALB, whose listener is HTTP or HTTPS, not TCP; Google and Azure: WebSockets on",
    ),
    "origin": (
        "proxy_set_header Host $http_host",
        "no header_up Host, except {http.request.hostport}",
        "no http-request set-header Host",
        "no host_rewrite_literal and no auto_host_rewrite",
        "passHostHeader true",
        "AWS: the ALB's preserve host header; or tailrace serve --allowed-origins https://YOUR.NAME",
    ),
    "last_event_id": (
        'no proxy_set_header Last-Event-ID "", and no cache in front of /v1/streams',
        "no header_up -Last-Event-ID",
        "no http-request del-header Last-Event-ID",
        "no request_headers_to_remove with last-event-id",
        "no headers middleware that removes Last-Event-ID",
        "a header policy that passes Last-Event-ID, and no caching",
    ),
}


def settings_for(found: Found, between: str = "") -> list[tuple[str, str]]:
    """Return the settings to change for something that was measured, as pairs of a proxy and its setting: those of the
    proxies that name themselves in `between`, else of all. Empty if nothing is wrong."""
    if found.problem is None:
        return []
    pairs = list(zip(PROXIES, _SETTINGS[found.problem], strict=True))
    named = [pair for pair in pairs if pair[0].lower() in between.lower()]
    return named or pairs
