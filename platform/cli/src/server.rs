//! The API server from the view of the commands: raw JSON requests over kube's client, which handles TLS and the
//! credentials of the kubeconfig.

use bytes::Bytes;
use futures::AsyncBufRead;
use http::{Method, Request, StatusCode, header};
use kube::{
    client::{Body, ConfigExt as _},
    core::Status,
};
use serde_json::Value;

use super::find::Places;
use crate::data_dir::Endpoints;

/// The field manager of every write of the commands.
pub(crate) const FIELD_MANAGER: &str = "mayfly";

/// A server's addresses as found on disk; it may not be running.
pub(crate) struct Server {
    client: kube::Client,
    config: kube::Config,
    endpoints: Option<Endpoints>,
    places: Places,
}

/// A successful response of the API.
pub(crate) struct ApiResponse {
    pub(crate) status: StatusCode,
    pub(crate) body: Value,
}

impl Server {
    pub(crate) fn new(
        config: kube::Config,
        endpoints: Option<Endpoints>,
        places: Places,
    ) -> anyhow::Result<Self> {
        let client = kube::Client::try_from(config.clone())?;
        Ok(Self { client, config, endpoints, places })
    }

    pub(crate) fn client(&self) -> &kube::Client {
        &self.client
    }

    /// The context's namespace, or `default`.
    pub(crate) fn namespace(&self) -> &str {
        &self.config.default_namespace
    }

    pub(crate) fn url(&self) -> String {
        self.config.cluster_url.to_string()
    }

    /// The other addresses of the server, if it is local and wrote them to the data directory.
    pub(crate) fn endpoints(&self) -> Option<&Endpoints> {
        self.endpoints.as_ref()
    }

    pub(crate) fn places(&self) -> &Places {
        &self.places
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Value, kube::Error> {
        self.get_as(path, "application/json").await
    }

    /// GETs with this `accept` header.
    pub(crate) async fn get_as(&self, path: &str, accept: &str) -> Result<Value, kube::Error> {
        let request = Request::get(path).header(header::ACCEPT, accept).body(Body::empty());
        Ok(self.call(request.map_err(kube::Error::HttpError)?).await?.body)
    }

    /// Sends a request with a JSON body of the type `content_type`.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: &Value,
    ) -> Result<ApiResponse, kube::Error> {
        let body = serde_json::to_vec(body).map_err(kube::Error::SerdeError)?;
        let request = Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, content_type);
        self.call(request.body(Body::from(body)).map_err(kube::Error::HttpError)?).await
    }

    async fn call(&self, request: Request<Body>) -> Result<ApiResponse, kube::Error> {
        let namespace = namespace_of(request.uri().path());
        let response = self.client.send(request).await?;
        let status = response.status();
        let bytes = response.into_body().collect_bytes().await?;
        if !status.is_success() {
            return Err(looked_in(api_error(status, &bytes), namespace.as_deref()));
        }
        let body = match bytes.is_empty() {
            true => Value::Null,
            false => serde_json::from_slice(&bytes).map_err(kube::Error::SerdeError)?,
        };
        Ok(ApiResponse { status, body })
    }

    /// GETs with a streamed response body.
    pub(crate) async fn stream(
        &self,
        path: &str,
        accept: &str,
    ) -> Result<impl AsyncBufRead + Unpin + use<>, kube::Error> {
        let request = Request::get(path)
            .header(header::ACCEPT, accept)
            .header(header::ACCEPT_ENCODING, "identity")
            .body(Vec::new())
            .map_err(kube::Error::HttpError)?;
        let namespace = namespace_of(path);
        let stream = self.client.request_stream(request).await;
        Ok(Box::pin(stream.map_err(|error| looked_in(error, namespace.as_deref()))?))
    }

    /// A service for requests with streamed bodies; kube's own client accepts only complete bodies.
    pub(crate) fn streaming<B>(
        &self,
    ) -> anyhow::Result<
        impl tower::Service<
            Request<B>,
            Response = http::Response<hyper::body::Incoming>,
            Error = tower::BoxError,
            Future: Send,
        >,
    >
    where
        B: http_body_util::BodyExt<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<tower::BoxError>,
    {
        let connector = self.config.rustls_https_connector()?;
        let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new())
            .build::<_, B>(connector);
        Ok(tower::ServiceBuilder::new()
            .layer(self.config.base_uri_layer())
            .option_layer(self.config.auth_layer()?)
            .map_err(tower::BoxError::from)
            .service(client))
    }
}

/// The Status in a response's body. For a response without one (of a proxy, for example), a Status is created from its
/// code.
pub(crate) fn api_error(status: StatusCode, body: &[u8]) -> kube::Error {
    let parsed = serde_json::from_slice::<Status>(body).ok().filter(|status| !status.message.is_empty());
    kube::Error::Api(Box::new(parsed.map_or_else(
        || {
            let text = String::from_utf8_lossy(body);
            let reason = status.canonical_reason().unwrap_or("");
            let message = match text.trim() {
                "" => format!("the server answered {} {reason}", status.as_u16()),
                text => text.chars().take(500).collect(),
            };
            Status::failure(&message, reason).with_code(status.as_u16())
        },
        |parsed| if parsed.code == 0 { parsed.with_code(status.as_u16()) } else { parsed },
    )))
}

/// The namespace in a path.
fn namespace_of(path: &str) -> Option<String> {
    let (namespace, _) = path.split_once("/namespaces/")?.1.split_once('/')?;
    Some(namespace.to_owned())
}

/// Adds the namespace to a "not found" error, which the API's message lacks.
fn looked_in(error: kube::Error, namespace: Option<&str>) -> kube::Error {
    match (error, namespace) {
        (kube::Error::Api(mut status), Some(namespace))
            if status.is_not_found()
                && status.message.ends_with(" not found")
                // A Namespace object is not within a namespace.
                && !status.message.starts_with("namespaces \"") =>
        {
            status.message.push_str(&format!(" in namespace {namespace}"));
            kube::Error::Api(status)
        }
        (error, _) => error,
    }
}

/// Whether the API reported that the object does not exist.
pub(crate) fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found())
}

/// Whether there was no response: the error is about the connection.
pub(crate) fn is_unanswered(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Service(_) | kube::Error::HyperError(_))
}

/// Encodes a name as one path segment.
pub(crate) fn segment(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' => {
                text.push(char::from(byte));
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

/// A path with its query; pairs without a value are omitted.
pub(crate) fn with_query(path: &str, pairs: &[(&str, Option<&str>)]) -> String {
    let mut query = url::form_urlencoded::Serializer::new(String::new());
    query.extend_pairs(pairs.iter().filter_map(|(key, value)| value.map(|value| (key, value))));
    match query.finish() {
        query if query.is_empty() => path.to_owned(),
        query => format!("{path}?{query}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_queries_are_escaped() {
        assert_eq!(segment("hello-1.x"), "hello-1.x");
        assert_eq!(segment("../a b?c%"), "..%2Fa%20b%3Fc%25");
        let pairs = [("labelSelector", Some("a=b,c!=d")), ("limit", None), ("x", Some(""))];
        assert_eq!(with_query("/p", &pairs), "/p?labelSelector=a%3Db%2Cc%21%3Dd&x=");
        assert_eq!(with_query("/p", &[("a", None)]), "/p");
    }

    #[test]
    fn what_is_not_there_is_said_with_its_namespace() {
        let said = |code: u16, message: &str, path: &str| {
            let body = serde_json::json!({"status": "Failure", "message": message, "reason": "NotFound", "code": code});
            let error = api_error(StatusCode::from_u16(code).unwrap(), body.to_string().as_bytes());
            match looked_in(error, namespace_of(path).as_deref()) {
                kube::Error::Api(status) => status.message.clone(),
                other => panic!("{other}"),
            }
        };
        for (code, message, path, expected) in [
            (
                404,
                "pods \"a\" not found",
                "/api/v1/namespaces/x/pods/a",
                "pods \"a\" not found in namespace x",
            ),
            (404, "nodes \"a\" not found", "/api/v1/nodes/a", "nodes \"a\" not found"),
            (404, "namespaces \"x\" not found", "/api/v1/namespaces/x", "namespaces \"x\" not found"),
            (404, "namespaces \"x\" not found", "/api/v1/namespaces/x/pods", "namespaces \"x\" not found"),
            (404, "no such path", "/api/v1/namespaces/x/pods/a", "no such path"),
        ] {
            assert_eq!(said(code, message, path), expected, "{path}");
        }
    }

    #[test]
    fn any_error_answer_becomes_a_status() {
        let text = |error: kube::Error| match error {
            kube::Error::Api(status) => (status.code, status.message.clone()),
            other => panic!("{other}"),
        };
        let status = br#"{"kind":"Status","status":"Failure","message":"no","reason":"NotFound","code":404}"#;
        assert_eq!(text(api_error(StatusCode::NOT_FOUND, status)), (404, "no".into()));
        assert_eq!(text(api_error(StatusCode::BAD_GATEWAY, b"oops")), (502, "oops".into()));
        let empty = text(api_error(StatusCode::BAD_GATEWAY, b""));
        assert_eq!(empty, (502, "the server answered 502 Bad Gateway".into()));
    }
}
