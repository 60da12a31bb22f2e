//! Services at another endpoint: what a task asks of AWS goes where the
//! operator says, in AWS's own protocols.
//!
//! [`services`] is the table of what can be spoken to, [`wire`] makes a task's
//! arguments a request and an answer a result, [`failing`] gives errors the names
//! that Step Functions gives them, [`sign`] signs, [`lambda`] calls functions that
//! live elsewhere. Not here: which service is where (the configuration), `.sync`,
//! which on AWS waits for events that other services send.

mod failing;
mod lambda;
mod services;
mod sign;
mod wire;

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, Uri};
use mayfly_workflows_language::definition::Pattern;
use mayfly_workflows_language::value::Value;

use crate::engine::{FunctionError, Reporter};
use crate::machine::TaskCall;

pub(crate) use lambda::invoke as invoke_function;
use services::Service;

/// How long a service may take to answer: AWS's own limit for a call.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Where services are, and who asks.
#[derive(Debug, Clone, Default)]
pub struct Endpoints {
    urls: HashMap<&'static str, Uri>,
    credentials: Option<Credentials>,
}

/// Signs requests. Without credentials they go out unsigned.
#[derive(Clone)]
pub struct Credentials {
    /// The key's name.
    pub access_key_id: String,
    /// The key.
    pub secret_access_key: String,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Credentials({})", self.access_key_id)
    }
}

/// An endpoint that cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EndpointError {
    /// Not a service of the table.
    #[error("tasks of the service {service:?} cannot be sent to an endpoint; those that can: {known}")]
    Service {
        /// What was named.
        service: String,
        /// What could be.
        known: String,
    },
    /// Not a URL one can send to.
    #[error("{url:?} is no endpoint: write http://host:port or https://host:port, with a path if need be")]
    Url {
        /// What was given.
        url: String,
    },
}

impl Endpoints {
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

    /// Signs what is sent.
    pub fn sign_as(&mut self, credentials: Credentials) {
        self.credentials = Some(credentials);
    }

    fn of(&self, service: &Service) -> Option<&Uri> {
        self.urls.get(service.key())
    }
}

/// Carries out a task whose service was pointed elsewhere; `None` when it was not.
pub(crate) async fn call(
    reporter: &Reporter,
    task: &TaskCall,
    service: &str,
    action: &str,
    aws_sdk: bool,
) -> Option<Result<Value, FunctionError>> {
    let service = services::named(service)?;
    let url = reporter.inner.config.endpoints.of(service)?;
    if task.resource.pattern() == Pattern::Sync {
        return Some(Err(FunctionError {
            error_type: "Mayfly.IntegrationNotSupported".to_owned(),
            cause: format!(
                "'{}' waits for events that only AWS sends. Call it without .sync and ask for its state in a loop, \
                 or use .waitForTaskToken.",
                task.arn
            ),
        }));
    }
    let naming = failing::Naming { service, aws_sdk };
    Some(answered(reporter, task, url, action, &naming).await)
}

async fn answered(
    reporter: &Reporter,
    task: &TaskCall,
    url: &Uri,
    action: &str,
    naming: &failing::Naming<'_>,
) -> Result<Value, FunctionError> {
    let request = wire::request(url, naming.service, action, naming.aws_sdk, &task.arguments)
        .map_err(|cause| FunctionError { error_type: "Mayfly.IntegrationNotSupported".to_owned(), cause })?;
    let response =
        send(reporter, request, naming.service.signing).await.map_err(|cause| naming.unreachable(&cause))?;
    if !response.status().is_success() {
        return Err(naming.refused(&response));
    }
    wire::answer(&response, naming.service, naming.aws_sdk, reporter.inner.now_ms())
        .map_err(|cause| naming.unreachable(&cause))
}

/// Signs and sends; what went wrong on the way is text.
async fn send(
    reporter: &Reporter,
    mut request: Request<Bytes>,
    signing_name: &str,
) -> Result<Response<Bytes>, String> {
    let config = &reporter.inner.config;
    if let Some(credentials) = &config.endpoints.credentials {
        sign::sign(&mut request, credentials, &config.region, signing_name, reporter.inner.now_ms());
    }
    match tokio::time::timeout(ANSWER_MAX, reporter.inner.deps.http.send(request)).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("no answer within {} s", ANSWER_MAX.as_secs())),
    }
}
