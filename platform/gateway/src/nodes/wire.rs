//! The format of requests between gateways: HTTP with headers of its own.
//!
//! A request's path has a prefix that names the action and the revision, or the function; the rest is the path that the
//! function sees. Status, headers, bodies and trailers are the function's; the time that its phases took comes in a
//! header. A response without that header is a refusal, as a JSON document.

use std::{borrow::Cow, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, Version, header,
    uri::{Authority, PathAndQuery, Scheme},
};
use mayfly_api::ObjectKey;
use mayfly_runtime::{Answer, Body, Timings};
use serde::{Deserialize, Serialize};

use crate::{
    body::{self, ResponseBody},
    headers,
    refusal::{Refusal, RefusalCode},
};

/// The path of a node's load.
pub(crate) const LOAD_PATH: &str = "/load";

/// The revision's uid: a deleted revision may have a successor of the same name.
const REVISION: HeaderName = HeaderName::from_static("mayfly-node-revision");
/// The time left for the response, in milliseconds.
const DEADLINE_MS: HeaderName = HeaderName::from_static("mayfly-node-deadline-ms");
/// The `host` header, which connections between nodes set for themselves.
const HOST: HeaderName = HeaderName::from_static("mayfly-node-host");
/// Scheme and authority of the URI, if it has them.
const ORIGIN: HeaderName = HeaderName::from_static("mayfly-node-origin");
/// The node that the request comes from.
const FROM: HeaderName = HeaderName::from_static("mayfly-node-from");
/// The phases of the call: cold (0 or 1), then queue, load, instantiate and run in microseconds.
const TIMINGS: HeaderName = HeaderName::from_static("mayfly-node-timings");
/// The code of a refusal.
const REFUSAL: HeaderName = HeaderName::from_static("mayfly-node-refusal");

/// The code of [`NodeRefusal::NotHosted`].
const NOT_HOSTED: &str = "not_hosted";
/// The size limit of a refusal's document, in bytes.
const REFUSAL_BYTES_MAX: usize = 64 << 10;

/// The action that a gateway requests from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NodeAction {
    /// Run the request on this node, by its replicas. Never sent on.
    Run,
    /// Find a place for the request, as the leader.
    Place,
    /// Queue an asynchronous invocation of the function.
    Invoke,
}

impl NodeAction {
    const ALL: [Self; 3] = [Self::Run, Self::Place, Self::Invoke];

    fn prefix(self) -> &'static str {
        match self {
            Self::Run => "/functions/",
            Self::Place => "/requests/",
            Self::Invoke => "/invocations/",
        }
    }
}

/// A function's request with its address.
#[derive(Debug)]
pub(crate) struct NodeRequest<B> {
    pub(crate) action: NodeAction,
    /// The revision; of an invocation the function.
    pub(crate) key: ObjectKey,
    /// The revision's uid; empty in an invocation.
    pub(crate) uid: String,
    /// The time left for the response.
    pub(crate) remaining: Duration,
    /// The node of the sender.
    pub(crate) from: String,
    /// As the function, or the queue, gets it.
    pub(crate) request: Request<B>,
}

impl<B> NodeRequest<B> {
    /// The request in the form for the wire. `None`: its address is too long.
    pub(crate) fn encode(self) -> Option<Request<B>> {
        let Self { action, key, uid, remaining, from, mut request } = self;
        let uri = request.uri();
        // The form `*` of OPTIONS has no slash to begin with.
        let rest = uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let rest = if rest.starts_with('/') { rest } else { "" };
        let path = format!("{}{}/{}{rest}", action.prefix(), key.namespace, key.name);
        let origin = uri.authority().map(|authority| {
            let scheme = uri.scheme_str().unwrap_or("http");
            HeaderValue::try_from(format!("{scheme}://{authority}")).ok()
        });
        *request.uri_mut() = PathAndQuery::from_maybe_shared(Bytes::from(path)).ok()?.into();
        // The client's version means nothing to the connection between the nodes: clients of HTTP/1.1 refuse 2, those
        // of HTTP/2 a path alone unless it is of HTTP/1.1.
        *request.version_mut() = Version::HTTP_11;
        let fields = request.headers_mut();
        let host = fields.remove(header::HOST);
        let milliseconds = u64::try_from(remaining.as_millis()).unwrap_or(u64::MAX);
        for (name, value) in [
            (REVISION, HeaderValue::try_from(uid).ok()),
            (FROM, HeaderValue::try_from(from).ok()),
            (DEADLINE_MS, Some(milliseconds.into())),
            (HOST, host),
            (ORIGIN, origin.flatten()),
        ] {
            // A client's own header of the name must not take its place.
            match value {
                Some(value) => fields.insert(name, value),
                None => fields.remove(name),
            };
        }
        Some(request)
    }

    /// The reverse of [`encode`](Self::encode). `None`: the request has another form.
    pub(crate) fn decode(mut request: Request<B>) -> Option<Self> {
        let whole = request.uri().path_and_query()?.as_str();
        let (action, rest) = NodeAction::ALL
            .into_iter()
            .find_map(|action| Some((action, whole.strip_prefix(action.prefix())?)))?;
        let (namespace, rest) = rest.split_once('/')?;
        let (name, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let key = ObjectKey::new(namespace, name);
        let path = PathAndQuery::try_from(if path.is_empty() { "*" } else { path }).ok()?;
        let fields = request.headers_mut();
        let mut text = |name: HeaderName| {
            let value = fields.remove(name)?;
            value.to_str().ok().map(str::to_owned)
        };
        let uid = text(REVISION)?;
        let from = text(FROM)?;
        let remaining = Duration::from_millis(text(DEADLINE_MS)?.parse().ok()?);
        let origin = text(ORIGIN);
        match fields.remove(HOST) {
            Some(host) => fields.insert(header::HOST, host),
            None => fields.remove(header::HOST),
        };
        let mut parts = http::uri::Parts::default();
        parts.path_and_query = Some(path);
        if let Some((scheme, authority)) = origin.as_deref().and_then(|origin| origin.split_once("://")) {
            parts.scheme = Some(Scheme::try_from(scheme).ok()?);
            parts.authority = Some(Authority::try_from(authority).ok()?);
        }
        *request.uri_mut() = Uri::from_parts(parts).ok()?;
        Some(Self { action, key, uid, remaining, from, request })
    }
}

/// The reason why a gateway did not run another gateway's request, or why the function gave no response.
#[derive(Debug)]
pub(crate) enum NodeRefusal {
    /// The node has no replica of the revision, or does not know it (yet).
    NotHosted,
    Refused(Refusal),
}

impl NodeRefusal {
    /// Whether the function has certainly not run.
    pub(crate) fn has_not_run(&self) -> bool {
        match self {
            Self::NotHosted => true,
            Self::Refused(refusal) => matches!(
                refusal.code,
                RefusalCode::NotReady
                    | RefusalCode::QueueFull
                    | RefusalCode::Overloaded
                    | RefusalCode::ComponentMissing
                    | RefusalCode::ShuttingDown
            ),
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RefusalDocument<'a> {
    message: Cow<'a, str>,
    hint: Cow<'a, str>,
    retry_after_ms: Option<u64>,
}

/// The function's response for the wire. `queue`: the time that the request waited for admission here.
pub(crate) fn encode_answer<B>(mut response: Response<B>, timings: &Timings, queue: Duration) -> Response<B> {
    let fields = response.headers_mut();
    headers::strip_hop_by_hop(fields);
    let phases = [queue + timings.queue, timings.load, timings.instantiate, timings.run];
    let mut text = u8::from(timings.cold).to_string();
    for phase in phases {
        text.push(' ');
        text.push_str(&phase.as_micros().to_string());
    }
    if let Ok(value) = HeaderValue::try_from(text) {
        fields.insert(TIMINGS, value);
    }
    response
}

pub(crate) fn encode_refusal(refusal: NodeRefusal) -> Response<ResponseBody> {
    let (code, status, refusal) = match refusal {
        NodeRefusal::NotHosted => (NOT_HOSTED, StatusCode::MISDIRECTED_REQUEST, Refusal::not_hosted()),
        NodeRefusal::Refused(refusal) => (refusal.code.as_str(), refusal.code.status(), refusal),
    };
    let retry_after_ms =
        refusal.retry_after.map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
    let document = RefusalDocument { message: refusal.message, hint: refusal.hint, retry_after_ms };
    let text = serde_json::to_vec(&document).unwrap_or_default();
    let mut response = Response::new(ResponseBody::full(text.into()));
    *response.status_mut() = status;
    let fields = response.headers_mut();
    fields.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    fields.insert(REFUSAL, HeaderValue::from_static(code));
    response
}

/// Reads another gateway's response.
///
/// # Errors
/// The reason why there is none from the function.
pub(crate) async fn decode_answer(mut response: Response<Body>) -> Result<Answer, NodeRefusal> {
    if let Some(timings) = response.headers_mut().remove(TIMINGS) {
        let timings = timings.to_str().ok().and_then(parse_timings).unwrap_or_default();
        return Ok(Answer { response, timings });
    }
    let code = code_of(response.headers());
    if code.as_deref() == Some(NOT_HOSTED) {
        return Err(NodeRefusal::NotHosted);
    }
    let code = RefusalCode::ALL.into_iter().find(|known| Some(known.as_str()) == code.as_deref());
    let status = response.status();
    let document = body::collect(response.into_body(), REFUSAL_BYTES_MAX).await.unwrap_or_default();
    let document = serde_json::from_slice::<RefusalDocument<'_>>(&document).ok();
    let (Some(code), Some(document)) = (code, document) else {
        let message = format!("another node's gateway answered with status {status}, in no known form");
        let hint = "all nodes must run the same version of Mayfly";
        return Err(NodeRefusal::Refused(Refusal::new(RefusalCode::NoAnswer, message, hint)));
    };
    let retry_after = document.retry_after_ms.map(Duration::from_millis);
    let refusal = Refusal::new(code, document.message.into_owned(), document.hint.into_owned());
    Err(NodeRefusal::Refused(Refusal { retry_after, ..refusal }))
}

fn code_of(fields: &HeaderMap) -> Option<String> {
    fields.get(REFUSAL)?.to_str().ok().map(str::to_owned)
}

fn parse_timings(text: &str) -> Option<Timings> {
    let mut numbers = text.split(' ').map(str::parse::<u64>);
    let cold = numbers.next()?.ok()? == 1;
    let mut phase = || Some(Duration::from_micros(numbers.next()?.ok()?));
    Some(Timings { cold, queue: phase()?, load: phase()?, instantiate: phase()?, run: phase()? })
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn sent(uri: &str, fields: &[(&'static str, &'static str)]) -> NodeRequest<()> {
        let mut request = Request::put(uri).body(()).unwrap();
        for (name, value) in fields {
            request.headers_mut().append(*name, HeaderValue::from_static(value));
        }
        NodeRequest {
            action: NodeAction::Run,
            key: ObjectKey::new("ns", "hello-00001"),
            uid: "uid-1".into(),
            remaining: Duration::from_millis(1234),
            from: "one".into(),
            request,
        }
    }

    #[test]
    fn a_request_arrives_as_it_was_sent() {
        for uri in ["/", "/?a=b", "/a/b%20c?d=/e?f", "*", "http://hello.ns:8080/x?y", "//x//"] {
            for fields in [
                vec![],
                vec![("host", "shop.example:8080"), ("x-forwarded-for", "10.0.0.9"), ("te", "trailers")],
                vec![("mayfly-node-host", "forged"), ("mayfly-node-origin", "http://forged")],
            ] {
                let before = sent(uri, &fields);
                let mut wire = sent(uri, &fields).encode().unwrap();
                assert!(wire.uri().path().starts_with("/functions/ns/hello-00001"), "{}", wire.uri());
                assert!(!wire.headers().contains_key(header::HOST));
                // The connection's own host.
                wire.headers_mut().insert(header::HOST, HeaderValue::from_static("10.1.1.1:7000"));
                let after = NodeRequest::decode(wire).unwrap();
                assert_eq!(after.request.uri(), before.request.uri());
                assert_eq!(after.request.method(), before.request.method());
                let mut expected = before.request.headers().clone();
                expected.remove("mayfly-node-host");
                expected.remove("mayfly-node-origin");
                assert_eq!(after.request.headers(), &expected);
                assert_eq!((after.action, after.key, after.uid), (before.action, before.key, before.uid));
                assert_eq!((after.remaining, after.from), (before.remaining, before.from));
            }
        }
    }

    #[test]
    fn other_requests_are_not_understood() {
        for uri in ["/", "/load", "/functions/ns", "/functions/ns/a/x", "/other/ns/a/x"] {
            assert!(NodeRequest::decode(Request::get(uri).body(()).unwrap()).is_none(), "{uri}");
        }
    }

    #[tokio::test]
    async fn an_answer_keeps_its_headers_and_times() {
        let timings = Timings {
            cold: true,
            queue: Duration::from_micros(5),
            load: Duration::from_micros(1),
            instantiate: Duration::from_micros(2),
            run: Duration::from_micros(3),
        };
        let response = Response::builder().status(418).header("server-timing", "own;dur=1");
        let response = response.header("mayfly-node-refusal", "forged").header("connection", "close");
        let response =
            encode_answer(response.body(body::empty()).unwrap(), &timings, Duration::from_micros(7));
        let answer = decode_answer(response).await.unwrap();
        assert_eq!(answer.response.status(), 418);
        assert_eq!(answer.response.headers()["server-timing"], "own;dur=1");
        assert!(!answer.response.headers().contains_key("connection"));
        assert_eq!(answer.timings, Timings { queue: Duration::from_micros(12), ..timings });
    }

    #[tokio::test]
    async fn a_refusal_is_the_same_on_the_other_side() {
        let wired = |refusal| async {
            decode_answer(encode_refusal(refusal).map(BodyExt::boxed_unsync)).await.unwrap_err()
        };
        assert!(matches!(wired(NodeRefusal::NotHosted).await, NodeRefusal::NotHosted));
        for code in RefusalCode::ALL {
            let refusal = Refusal::new(code, "a \"message\"", "a hint");
            let refusal = Refusal { retry_after: Some(Duration::from_millis(1500)), ..refusal };
            match wired(NodeRefusal::Refused(refusal.clone())).await {
                NodeRefusal::Refused(received) => assert_eq!(received, refusal),
                NodeRefusal::NotHosted => panic!("{code:?}"),
            }
        }
        let other = Response::builder().status(404).body(body::empty()).unwrap();
        let NodeRefusal::Refused(refusal) = decode_answer(other).await.unwrap_err() else { panic!() };
        assert_eq!(refusal.code, RefusalCode::NoAnswer);
    }
}
