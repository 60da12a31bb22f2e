//! The standard health protocol of gRPC (`grpc.health.v1.Health/Check`), over HTTP/2 without TLS.

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{Request, body::Bytes, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;

use super::http_get::connect;

/// The number of bytes of a response that are read: the message has one field.
const BODY_BYTES_MAX: usize = 10 << 10;
/// The length of gRPC's message prefix: a flag and a length.
const PREFIX_BYTES: usize = 5;

#[derive(Clone, PartialEq, Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

#[derive(Clone, PartialEq, Message)]
struct HealthCheckResponse {
    #[prost(enumeration = "ServingStatus", tag = "1")]
    status: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
enum ServingStatus {
    Unknown = 0,
    Serving = 1,
    NotServing = 2,
    ServiceUnknown = 3,
}

/// Requests the health of a service.
///
/// # Errors
/// Upstream's message: the service is not healthy, or did not answer.
pub(crate) async fn check(host: &str, port: u16, service: &str) -> Result<(), String> {
    let stream = connect(host, port).await.map_err(|error| format!("error: {error}"))?;
    let words = |error: hyper::Error| format!("error: health rpc probe failed: {error}");
    let (mut sender, connection) =
        http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.map_err(words)?;
    let request = Request::post(format!("http://{host}:{port}/grpc.health.v1.Health/Check"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("user-agent", super::http_get::PROBE_AGENT)
        .body(Full::new(frame(service)))
        .map_err(|error| error.to_string())?;
    let answer = async {
        let answer = sender.send_request(request).await.map_err(words)?;
        let head = answer.headers().clone();
        let body = Limited::new(answer.into_body(), BODY_BYTES_MAX).collect().await;
        let body = body.map_err(|error| format!("error: health rpc probe failed: {error}"))?;
        let trailers = body.trailers().cloned().unwrap_or_default();
        // A response without a message has its status in the headers.
        let field = |name: &str| {
            let value = trailers.get(name).or_else(|| head.get(name))?;
            value.to_str().ok().map(str::to_owned)
        };
        let (code, message) = (field("grpc-status"), field("grpc-message").unwrap_or_default());
        verdict(code.as_deref(), &message, &body.to_bytes())
    };
    tokio::pin!(answer);
    tokio::select! {
        biased;
        answer = &mut answer => return answer,
        ended = connection => if let Err(error) = ended { return Err(words(error)) },
    }
    answer.await
}

fn frame(service: &str) -> Bytes {
    let message = HealthCheckRequest { service: service.to_owned() }.encode_to_vec();
    // The name of a service fits into 4 GiB.
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[0][..], &length, &message].concat().into()
}

fn verdict(code: Option<&str>, message: &str, body: &[u8]) -> Result<(), String> {
    match code {
        Some("0") => {}
        Some("12") => {
            return Err("error: this server does not implement the grpc health protocol \
                                  (grpc.health.v1.Health)"
                .into());
        }
        Some(code) => return Err(format!("error: health rpc probe failed: code = {code} desc = {message}")),
        None => return Err("error: health rpc probe failed: the answer has no grpc-status".into()),
    }
    let response = HealthCheckResponse::decode(body.get(PREFIX_BYTES..).unwrap_or_default())
        .map_err(|error| format!("error: health rpc probe failed: {error}"))?;
    match response.status() {
        ServingStatus::Serving => Ok(()),
        other => {
            let name = match other {
                ServingStatus::NotServing => "NOT_SERVING",
                ServingStatus::ServiceUnknown => "SERVICE_UNKNOWN",
                ServingStatus::Unknown | ServingStatus::Serving => "UNKNOWN",
            };
            Err(format!("service unhealthy (responded with {name:?})"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_serving_service_is_healthy() {
        let body = |status: i32| {
            let message = HealthCheckResponse { status }.encode_to_vec();
            let length = u8::try_from(message.len()).unwrap();
            [&[0, 0, 0, 0, length][..], &message].concat()
        };
        assert_eq!(verdict(Some("0"), "", &body(1)), Ok(()));
        let not_serving = verdict(Some("0"), "", &body(2)).unwrap_err();
        assert_eq!(not_serving, "service unhealthy (responded with \"NOT_SERVING\")");
        assert!(verdict(Some("0"), "", &[]).unwrap_err().contains("UNKNOWN"));
        assert!(verdict(Some("12"), "", &[]).unwrap_err().contains("does not implement"));
        assert!(verdict(Some("5"), "unknown service", &[]).unwrap_err().contains("desc = unknown service"));
        assert!(verdict(None, "", &body(1)).is_err());
    }

    #[test]
    fn a_request_has_the_services_name_behind_its_length() {
        assert_eq!(&frame("")[..], [0, 0, 0, 0, 0]);
        assert_eq!(&frame("ab")[..], [0, 0, 0, 0, 4, 10, 2, b'a', b'b']);
    }
}
