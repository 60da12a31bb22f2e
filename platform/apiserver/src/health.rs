//! `/livez`, `/readyz` and `/healthz`, with `?verbose`, `?exclude=CHECK` and `/livez/CHECK`, as upstream's
//! (`apiserver/pkg/server/healthz`). They need no token.

use axum::{body::Body, response::Response};
use http::{HeaderValue, StatusCode, header};

use crate::server::ServerState;

/// A check's name, and why it fails.
type Check = (&'static str, Result<(), &'static str>);

/// Answers a health path; `None` for other paths.
pub(crate) fn answer(server: &ServerState, path: &[&str], query: &str) -> Option<Response> {
    let (endpoint, one) = match path {
        [endpoint @ ("healthz" | "livez" | "readyz")] => (*endpoint, None),
        [endpoint @ ("healthz" | "livez" | "readyz"), check] => (*endpoint, Some(*check)),
        _ => return None,
    };
    let checks = checks(server, endpoint == "readyz");
    if let Some(one) = one {
        let check = checks.into_iter().find(|(name, _)| *name == one)?;
        return Some(report(endpoint, &[check], false));
    }
    let pairs = || url::form_urlencoded::parse(query.as_bytes());
    let verbose = pairs().any(|(key, _)| key == "verbose");
    let is_excluded = |name: &str| pairs().any(|(key, value)| key == "exclude" && value == name);
    let checks: Vec<Check> = checks.into_iter().filter(|(name, _)| !is_excluded(name)).collect();
    Some(report(endpoint, &checks, verbose))
}

fn checks(server: &ServerState, readiness: bool) -> Vec<Check> {
    let store = if server.store.failure().is_some() {
        Err("it accepts no more writes; check its disk, then restart the server")
    } else if readiness && server.store.is_full() {
        Err("the disk is full; writes are refused until there is room in the data directory")
    } else {
        Ok(())
    };
    let mut checks = vec![("ping", Ok(())), ("store", store)];
    if readiness {
        let stopping = server.shutdown.is_cancelled();
        checks.push(("shutdown", if stopping { Err("the server is shutting down") } else { Ok(()) }));
    }
    checks
}

fn report(endpoint: &str, checks: &[Check], verbose: bool) -> Response {
    let failed = checks.iter().any(|(_, result)| result.is_err());
    let lines = checks.iter().map(|(name, result)| match result {
        Ok(()) => format!("[+]{name} ok\n"),
        Err(why) => format!("[-]{name} failed: {why}\n"),
    });
    let (code, text) = match (failed, verbose) {
        (true, _) => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("{}{endpoint} check failed\n", lines.collect::<String>()),
        ),
        (false, true) => (StatusCode::OK, format!("{}{endpoint} check passed\n", lines.collect::<String>())),
        (false, false) => (StatusCode::OK, "ok".to_owned()),
    };
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = code;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}
