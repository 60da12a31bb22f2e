//! A host whose functions are closures of a test.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use mayfly_api::ObjectKey;
use mayfly_runtime::{Answer, Body, CallError, FunctionHost, HostedFunction, HostedSpec, Timings};
use tokio::time::Instant;

type Act =
    dyn Fn(HostedSpec, Request<Body>) -> BoxFuture<'static, Result<Response<Body>, CallError>> + Send + Sync;

/// Runs a closure for each call, and counts the calls that have started and are neither answered nor dropped.
pub struct ScriptedHost {
    act: Arc<Act>,
    pub running: Arc<AtomicUsize>,
}

struct ScriptedFunction {
    spec: HostedSpec,
    act: Arc<Act>,
    running: Arc<AtomicUsize>,
}

impl ScriptedHost {
    pub fn new<F>(act: impl Fn(HostedSpec, Request<Body>) -> F + Send + Sync + 'static) -> Arc<Self>
    where
        F: Future<Output = Result<Response<Body>, CallError>> + Send + 'static,
    {
        let act: Arc<Act> = Arc::new(move |spec, request| Box::pin(act(spec, request)));
        Arc::new(Self { act, running: Arc::default() })
    }
}

impl FunctionHost for ScriptedHost {
    fn prepare(&self, spec: HostedSpec) -> Arc<dyn HostedFunction> {
        Arc::new(ScriptedFunction { spec, act: self.act.clone(), running: self.running.clone() })
    }

    fn forget(&self, _: &ObjectKey) {}
}

struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl HostedFunction for ScriptedFunction {
    fn call(
        &self,
        request: Request<Body>,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Answer, CallError>> {
        let limit = self.spec.timeout;
        self.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(self.running.clone());
        let acting = (self.act)(self.spec.clone(), request);
        Box::pin(async move {
            let _running = running;
            let acted = tokio::time::timeout_at(deadline, acting).await;
            let response = acted.map_err(|_| CallError::TimedOut { limit })??;
            Ok(Answer { response, timings: Timings::default() })
        })
    }

    fn load(&self) -> BoxFuture<'static, Result<(), CallError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn is_loaded(&self) -> bool {
        false
    }

    fn unload(&self) {}
}

pub fn text(text: impl Into<String>) -> Body {
    Full::new(Bytes::from(text.into())).map_err(|never| match never {}).boxed_unsync()
}
