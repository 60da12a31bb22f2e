//! Service integrations at configured endpoints, in AWS's own protocols.
//!
//! [`services`] is the table of supported services, [`wire`] makes a task's arguments a request and an answer a result,
//! [`failing`] gives errors the names that Step Functions gives them, [`mayfly_sigv4`] signs, [`lambda`] calls functions at an
//! endpoint, [`s3`] has buckets. Services with XML protocols are driven by a [`model`] of their operations:
//! [`rest_xml`] and [`query`] over [`xml`]. Not here: the endpoints of services (the configuration), `.sync`, which on
//! AWS waits for events that other services send.

mod failing;
mod lambda;
mod model;
mod query;
mod rest_xml;
mod s3;
mod services;
mod wire;
mod xml;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
pub use mayfly_sigv4::Credentials;
use mayfly_workflows_language::definition::{IntegrationKind, IntegrationPattern};
use mayfly_workflows_language::value::{Map, Value};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::engine::{
    Config, EngineDeps, FunctionError, HttpTasks, ObjectCall, ObjectError, Reporter, Streamed,
};
use crate::timers::Clock;
use mayfly_workflows_machine::TaskCall;

pub(crate) use lambda::invoke as invoke_function;
pub(crate) use s3::S3;
use services::Service;

/// The timeout of a service's answer: AWS's own limit for a call.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Endpoints of services, and the credentials that sign requests.
#[derive(Debug, Clone, Default)]
pub struct AwsEndpoints {
    urls: HashMap<&'static str, Uri>,
    /// Without credentials requests go out unsigned.
    credentials: Option<Credentials>,
    region: Option<String>,
}

/// An endpoint that cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EndpointError {
    /// Not a service of the table.
    #[error("tasks of the service {service:?} cannot be sent to an endpoint; those that can: {known}")]
    Service {
        /// The service in the setting.
        service: String,
        /// The known services.
        known: String,
    },
    /// Not a URL one can send to.
    #[error("{url:?} is no endpoint: write http://host:port or https://host:port, with a path if need be")]
    Url {
        /// The URL in the setting.
        url: String,
    },
}

impl AwsEndpoints {
    /// Points a service at a URL. The service is named as in a task's resource:
    /// `sqs`, `events`, `aws-sdk:secretsmanager`.
    pub fn point(&mut self, service: &str, url: &str) -> Result<(), EndpointError> {
        let name = service.strip_prefix("aws-sdk:").unwrap_or(service);
        let service = services::named(name).ok_or_else(|| EndpointError::Service {
            service: name.to_owned(),
            known: services::all_names(),
        })?;
        let uri: Option<Uri> = url.trim_end_matches('/').parse().ok();
        let usable = |uri: &Uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.host().is_some()
                && uri.query().is_none()
        };
        let uri = uri.filter(usable).ok_or_else(|| EndpointError::Url { url: url.to_owned() })?;
        self.urls.insert(service.key(), uri);
        Ok(())
    }

    /// Signs requests with these credentials.
    pub fn sign_as(&mut self, credentials: Credentials) {
        self.credentials = Some(credentials);
    }

    /// Signs for this region; without it for that of the engine's ARNs.
    pub fn sign_for(&mut self, region: String) {
        self.region = Some(region);
    }

    /// Whether any service has an endpoint.
    pub fn is_empty(&self) -> bool {
        self.urls.is_empty()
    }

    fn of(&self, service: &Service) -> Option<&Uri> {
        self.urls.get(service.key())
    }
}

/// One service at its endpoint.
struct Client {
    service: &'static Service,
    url: Uri,
    http: Arc<dyn HttpTasks>,
    clock: Arc<dyn Clock>,
    credentials: Option<Credentials>,
    region: String,
}

impl Client {
    /// `None` when the service was pointed nowhere.
    fn of(config: &Config, deps: &EngineDeps, service: &'static Service) -> Option<Self> {
        let url = config.endpoints.of(service)?.clone();
        Some(Self {
            service,
            url,
            http: deps.http.clone(),
            clock: deps.clock.clone(),
            credentials: config.endpoints.credentials.clone(),
            region: config.endpoints.region.clone().unwrap_or_else(|| config.region.clone()),
        })
    }

    /// Signs and sends; what went wrong on the way is text.
    async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, String> {
        in_time(self.http.send(self.signed(request))).await
    }

    /// Like `call`, for a response whose body may be large.
    async fn open(&self, request: Request<Bytes>) -> Result<Response<Streamed>, String> {
        in_time(self.http.open(self.signed(request))).await
    }

    fn signed(&self, request: Request<Bytes>) -> Request<Bytes> {
        let Some(credentials) = &self.credentials else { return request };
        let (mut head, body) = request.into_parts();
        let (hash, now_ms) = (mayfly_sigv4::body_sha256(&body), self.clock.now_ms());
        mayfly_sigv4::sign(&mut head, &hash, credentials, &self.region, self.service.signing, now_ms);
        Request::from_parts(head, body)
    }
}

async fn in_time<T>(answer: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    match tokio::time::timeout(ANSWER_MAX, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("no answer within {} s", ANSWER_MAX.as_secs())),
    }
}

/// Everything but what RFC 3986 leaves unreserved is encoded.
fn escaped(text: &str) -> String {
    const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
    utf8_percent_encode(text, ENCODED).to_string()
}

/// Carries out a task of `aws-sdk:s3`, wherever the buckets are.
pub(crate) async fn call_objects(
    reporter: &Reporter,
    task: &TaskCall,
    action: &str,
    request_id: impl FnOnce() -> String,
) -> Result<Value, FunctionError> {
    let name = crate::executor::sdk::capital(action);
    let operation = model::S3.get(&name).ok_or_else(|| not_carried_out("s3", action, &model::S3))?;
    let arguments = task.arguments.as_object().cloned().unwrap_or_default();
    let asked = async {
        model::check(operation, &arguments).map_err(ObjectError::invalid)?;
        let known = operation.input.keys();
        let given =
            known.filter_map(|name| Some((name.as_str().into(), model::argument(&arguments, name)?.clone())));
        let call = ObjectCall {
            operation: name,
            arguments: Value::from(given.collect::<Map>()).to_serde(),
            body_bytes_max: reporter.inner.config.limits.execution.payload_bytes_max,
        };
        reporter.inner.deps.objects.call(call).await
    };
    asked.await.map(|told| Value::from(&told)).map_err(|error| error.for_task(request_id))
}

fn not_carried_out(service: &str, action: &str, model: &model::Model) -> FunctionError {
    let known: Vec<_> = model.keys().map(|name| crate::executor::sdk::small(name)).collect();
    FunctionError::not_supported(format!(
        "{service}:{action} is not carried out here; of {service} there are {}",
        known.join(", ")
    ))
}

/// Performs a task whose service has a configured endpoint; `None` when it has none.
pub(crate) async fn call(
    reporter: &Reporter,
    task: &TaskCall,
    service: &str,
    action: &str,
    kind: IntegrationKind,
) -> Option<Result<Value, FunctionError>> {
    let service = services::named(service)?;
    let client = Client::of(&reporter.inner.config, &reporter.inner.deps, service)?;
    if task.resource.pattern() == IntegrationPattern::Sync {
        return Some(Err(FunctionError::not_supported(format!(
            "'{}' waits for events that only AWS sends. Call it without .sync and ask for its state in a loop, \
                 or use .waitForTaskToken.",
            task.arn
        ))));
    }
    let naming = failing::Naming { service, kind };
    Some(ask(&client, task, action, &naming).await)
}

async fn ask(
    client: &Client,
    task: &TaskCall,
    action: &str,
    naming: &failing::Naming<'_>,
) -> Result<Value, FunctionError> {
    let request = wire::request(&client.url, naming.service, action, naming.kind, &task.arguments)?;
    let response = client.send(request).await.map_err(|cause| naming.unreachable(&cause))?;
    if !response.status().is_success() {
        return Err(naming.refused(&response));
    }
    wire::answer(&response, naming.service, action, naming.kind, client.clock.now_ms())
        .map_err(|cause| naming.unreachable(&cause))
}
