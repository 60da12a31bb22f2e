//! `/livez`, `/readyz` and `/healthz`, with `?verbose`, `?exclude=CHECK` and `/livez/CHECK`, as upstream's
//! (`apiserver/pkg/server/healthz`). They need no token.

use std::collections::BTreeSet;

use axum::{body::Body, response::Response};
use http::{HeaderValue, StatusCode, header};

use crate::server::ServerState;

/// A check of the server.
struct Check {
    name: &'static str,
    /// `Err`: why it fails.
    result: Result<(), &'static str>,
    /// Whether the request leaves it out.
    excluded: bool,
}

impl Check {
    fn new(name: &'static str, result: Result<(), &'static str>) -> Self {
        Self { name, result, excluded: false }
    }

    fn fails(&self) -> bool {
        !self.excluded && self.result.is_err()
    }

    fn line(&self) -> String {
        match (self.excluded, self.result) {
            (true, _) => format!("[+]{} excluded: ok\n", self.name),
            (false, Ok(())) => format!("[+]{} ok\n", self.name),
            (false, Err(why)) => format!("[-]{} failed: {why}\n", self.name),
        }
    }
}

/// Answers a health path; `None` for other paths.
pub(crate) fn answer(server: &ServerState, path: &[&str], query: &str) -> Option<Response> {
    let (endpoint, one) = match path {
        [endpoint @ ("healthz" | "livez" | "readyz")] => (*endpoint, None),
        [endpoint @ ("healthz" | "livez" | "readyz"), check] => (*endpoint, Some(*check)),
        _ => return None,
    };
    let mut checks = checks(server, endpoint == "readyz");
    if let Some(one) = one {
        let check = checks.into_iter().find(|check| check.name == one)?;
        return Some(report(endpoint, &[check], "", false));
    }
    let pairs = || url::form_urlencoded::parse(query.as_bytes());
    let verbose = pairs().any(|(key, _)| key == "verbose");
    let excluded: BTreeSet<String> =
        pairs().filter(|(key, _)| key == "exclude").map(|(_, value)| value.into_owned()).collect();
    for check in &mut checks {
        check.excluded = excluded.contains(check.name);
    }
    let unknown = excluded.iter().filter(|name| checks.iter().all(|check| check.name != *name));
    let unknown: Vec<_> = unknown.map(|name| format!("{name:?}")).collect();
    let warning = match unknown.as_slice() {
        [] => String::new(),
        unknown => {
            format!("warn: some health checks cannot be excluded: no matches for {}\n", unknown.join(","))
        }
    };
    Some(report(endpoint, &checks, &warning, verbose))
}

fn checks(server: &ServerState, readiness: bool) -> Vec<Check> {
    let store = if server.store.failure().is_some() {
        Err("it accepts no more writes; check its disk, then restart the server")
    } else if readiness && server.store.is_full() {
        Err("the disk is full; writes are refused until there is room in the data directory")
    } else {
        Ok(())
    };
    let mut checks = vec![Check::new("ping", Ok(())), Check::new("store", store)];
    if readiness {
        let stopping = server.shutdown.is_cancelled();
        let result = if stopping { Err("the server is shutting down") } else { Ok(()) };
        checks.push(Check::new("shutdown", result));
    }
    checks
}

/// `warning`: the last line of the checks in verbose reports.
fn report(endpoint: &str, checks: &[Check], warning: &str, verbose: bool) -> Response {
    let failed = checks.iter().any(Check::fails);
    let lines = checks.iter().map(Check::line).collect::<String>() + warning;
    let (code, text) = match (failed, verbose) {
        (true, _) => (StatusCode::SERVICE_UNAVAILABLE, format!("{lines}{endpoint} check failed\n")),
        (false, true) => (StatusCode::OK, format!("{lines}{endpoint} check passed\n")),
        (false, false) => (StatusCode::OK, "ok".to_owned()),
    };
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = code;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}
