//! The path of a call: its instance, its start, its answer.

use std::sync::{Arc, atomic::Ordering};

use futures::future::BoxFuture;
use http::Request;
use http_body_util::BodyExt as _;
use mayfly_api::function::Isolation;
use mayfly_runtime::{Answer, Body, CallError, Timings};
use tokio::time::Instant;
use wasmtime_wasi_http::{p2::bindings::Proxy, p3::bindings::Service};

use super::Function;
use crate::{
    cache::{CacheEntry, Pre},
    call::{self, CallLimits, GuestReply, Running},
    failure,
    guest::MemoryUse,
    metrics::CallOutcome,
    record::Recording,
    reuse::{self, Idle, Instance, Store},
    slots::InstanceSlot,
};

/// The instance in which a call runs.
enum InstanceSource {
    /// An instance that answered an earlier call.
    KeptWasi0_2(Instance<Proxy>),
    KeptWasi0_3(Instance<Service>),
    /// An instance still to be created.
    New(InstanceSlot),
}

/// A call that runs, or one that waits for its component or its slot.
enum Start {
    Now(Started),
    Later(BoxFuture<'static, Result<Started, CallError>>),
}

struct Started {
    running: Running,
    reply: GuestReply,
    cold: bool,
    loaded: Instant,
    slotted: Instant,
}

impl Function {
    /// Answers one request. The returned future holds the request only while it waits for a component or a slot.
    pub(crate) fn call(
        self: Arc<Self>,
        request: Request<Body>,
        deadline: Instant,
    ) -> BoxFuture<'static, Result<Answer, CallError>> {
        let started = Instant::now();
        self.used.store(self.host.millis_since_start(started), Ordering::Relaxed);
        let recording = Recording::begin(&self.spec.revision, &request, started);
        let start = self.start(request, deadline, started, &recording);
        let caller = CancelOnDrop { function: self, waits: true, recording };
        Box::pin(async move {
            let mut caller = caller;
            let result = caller.function.answer(start, deadline, started, &caller.recording).await;
            caller.waits = false;
            caller.function.note(&result, &caller.recording);
            let (answered, timings) = result?;
            Ok(Answer { response: answered.response.map(|body| body.boxed_unsync()), timings })
        })
    }

    async fn answer(
        &self,
        start: Result<Start, CallError>,
        deadline: Instant,
        started: Instant,
        recording: &Recording,
    ) -> Result<(call::Answered, Timings), CallError> {
        let Started { running, reply, cold, loaded, slotted } = match start? {
            Start::Now(started) => started,
            Start::Later(start) => start.await?,
        };
        recording.record(|call| call.slot_at = Some(slotted));
        let limits = CallLimits {
            deadline,
            timeout: self.spec.timeout,
            response_bytes_max: self.spec.response_bytes_max,
        };
        let answered = call::answer(running, reply, limits, &self.program, recording).await?;
        let run_from = answered.instantiated.unwrap_or(slotted);
        let timings = Timings {
            cold,
            queue: slotted - loaded,
            load: loaded - started,
            instantiate: run_from - slotted,
            run: run_from.elapsed(),
        };
        Ok((answered, timings))
    }

    fn start(
        self: &Arc<Self>,
        request: Request<Body>,
        deadline: Instant,
        now: Instant,
        recording: &Recording,
    ) -> Result<Start, CallError> {
        if self.host.is_stopping() {
            return Err(CallError::ShuttingDown);
        }
        let loaded = self.component.load();
        let Some(component) = &*loaded else {
            let start = self.clone().start_cold(request, deadline, recording.clone());
            return Ok(Start::Later(Box::pin(start)));
        };
        recording.record(|call| call.loaded = Some(now));
        match self.instance_source(component, now)? {
            Some(source) => {
                let (running, reply) = self.run(component, source, request, recording)?;
                Ok(Start::Now(Started { running, reply, cold: false, loaded: now, slotted: now }))
            }
            None => {
                let (function, component, recording) = (self.clone(), component.clone(), recording.clone());
                Ok(Start::Later(Box::pin(async move {
                    let (slot, slotted) = function.slot(deadline, now).await?;
                    let (running, reply) =
                        function.run(&component, InstanceSource::New(slot), request, &recording)?;
                    Ok(Started { running, reply, cold: false, loaded: now, slotted })
                })))
            }
        }
    }

    /// Starts a call whose component has to be loaded first.
    async fn start_cold(
        self: Arc<Self>,
        request: Request<Body>,
        deadline: Instant,
        recording: Recording,
    ) -> Result<Started, CallError> {
        recording.record(|call| call.cold = true);
        let loading = tokio::time::timeout_at(deadline, self.component()).await;
        let component = loading.map_err(|_| CallError::TimedOut { limit: self.spec.timeout })??;
        let loaded = Instant::now();
        recording.record(|call| call.loaded = Some(loaded));
        let (source, slotted) = match self.instance_source(&component, loaded)? {
            Some(source) => (source, loaded),
            None => {
                let (slot, slotted) = self.slot(deadline, loaded).await?;
                (InstanceSource::New(slot), slotted)
            }
        };
        let (running, reply) = self.run(&component, source, request, &recording)?;
        Ok(Started { running, reply, cold: true, loaded, slotted })
    }

    /// An idle instance or a slot for a new one, if there is either.
    fn instance_source(
        &self,
        component: &CacheEntry,
        now: Instant,
    ) -> Result<Option<InstanceSource>, CallError> {
        let reuse = self.spec.isolation == Isolation::Reuse;
        let kept = match &component.loaded().pre {
            Pre::HttpWasi0_2(_) => reuse
                .then(|| self.kept(&self.warm().idle_0_2, now))
                .flatten()
                .map(InstanceSource::KeptWasi0_2),
            Pre::HttpWasi0_3(_) => reuse
                .then(|| self.kept(&self.warm().idle_0_3, now))
                .flatten()
                .map(InstanceSource::KeptWasi0_3),
            Pre::CommandWasi0_2(_) | Pre::CommandWasi0_3(_) => {
                return Err(CallError::ComponentInvalid(
                    "it is a program (wasi:cli/run), not a function: run it in a Pod or a Job".into(),
                ));
            }
        };
        Ok(kept.or_else(|| self.share.try_take().map(InstanceSource::New)))
    }

    fn kept<E>(&self, idle: &Idle<E>, now: Instant) -> Option<Instance<E>> {
        let (instance, too_old) = idle.take(now);
        if too_old > 0 {
            self.host.metrics.recycled.inc_by(too_old);
        }
        instance
    }

    /// Creates the guest's future and the receiver of its answer.
    fn run(
        self: &Arc<Self>,
        component: &Arc<CacheEntry>,
        source: InstanceSource,
        request: Request<Body>,
        recording: &Recording,
    ) -> Result<(Running, GuestReply), CallError> {
        let (function, reply) = (self.clone(), GuestReply::default());
        let running: Running = match source {
            InstanceSource::KeptWasi0_2(mut instance) => {
                instance.record(recording);
                let call = call::p2::Preview2Call::new(&mut instance.store, request, &reply)?;
                Box::pin(function.call_0_2(instance, call))
            }
            InstanceSource::KeptWasi0_3(mut instance) => {
                instance.record(recording);
                let call = call::p3::Preview3Call::new(&mut instance.store, request, &reply)?;
                Box::pin(function.call_0_3(instance, call))
            }
            InstanceSource::New(slot) => {
                let mut store = reuse::store(&component.loaded().host, self.program.clone());
                store.data_mut().memory.record(recording);
                if matches!(component.loaded().pre, Pre::HttpWasi0_3(_)) {
                    let call = call::p3::Preview3Call::new(&mut store, request, &reply)?;
                    Box::pin(function.fresh_0_3(component.clone(), slot, store, call))
                } else {
                    let call = call::p2::Preview2Call::new(&mut store, request, &reply)?;
                    Box::pin(function.fresh_0_2(component.clone(), slot, store, call))
                }
            }
        };
        Ok((running, reply))
    }

    /// A slot for one more instance; waits if none is free.
    async fn slot(&self, deadline: Instant, now: Instant) -> Result<(InstanceSlot, Instant), CallError> {
        if let Some(slot) = self.share.try_take() {
            return Ok((slot, now));
        }
        let until = deadline.min(now + self.host.config.slot_wait_max);
        match self.host.slot(&self.share, until).await {
            Some(slot) => Ok((slot, Instant::now())),
            None => Err(failure::no_slot(&self.share)),
        }
    }

    /// Creates the store after the slot: on an early return they are dropped in reverse order.
    async fn fresh_0_2(
        self: Arc<Self>,
        component: Arc<CacheEntry>,
        slot: InstanceSlot,
        mut store: Store,
        call: call::p2::Preview2Call,
    ) -> Result<(), CallError> {
        let Pre::HttpWasi0_2(pre) = &component.loaded().pre else { return Err(CallError::NoAnswer) };
        let made = call::p2::instantiate(pre, &mut store).await;
        let exports = made.map_err(|error| failure::call_error(&error, &store.data().memory))?;
        call.instantiated();
        self.call_0_2(Instance::new(store, exports, slot), call).await
    }

    async fn call_0_2(
        self: Arc<Self>,
        mut instance: Instance<Proxy>,
        call: call::p2::Preview2Call,
    ) -> Result<(), CallError> {
        instance.store.data_mut().memory.begin_call();
        let called = call.run(&mut instance).await;
        self.ended(&called, &mut instance.store.data_mut().memory);
        called?;
        if self.spec.isolation == Isolation::Reuse {
            self.keep(&self.warm().idle_0_2, instance);
        }
        Ok(())
    }

    /// Creates the store after the slot: on an early return they are dropped in reverse order.
    async fn fresh_0_3(
        self: Arc<Self>,
        component: Arc<CacheEntry>,
        slot: InstanceSlot,
        mut store: Store,
        call: call::p3::Preview3Call,
    ) -> Result<(), CallError> {
        let Pre::HttpWasi0_3(pre) = &component.loaded().pre else { return Err(CallError::NoAnswer) };
        let made = call::p3::instantiate(pre, &mut store).await;
        let exports = made.map_err(|error| failure::call_error(&error, &store.data().memory))?;
        call.instantiated();
        self.call_0_3(Instance::new(store, exports, slot), call).await
    }

    async fn call_0_3(
        self: Arc<Self>,
        mut instance: Instance<Service>,
        call: call::p3::Preview3Call,
    ) -> Result<(), CallError> {
        instance.store.data_mut().memory.begin_call();
        let called = call.run(&mut instance).await;
        self.ended(&called, &mut instance.store.data_mut().memory);
        called?;
        if self.spec.isolation == Isolation::Reuse {
            self.keep(&self.warm().idle_0_3, instance);
        }
        Ok(())
    }

    fn keep<E>(&self, idle: &Idle<E>, instance: Instance<E>) {
        instance.store.data().end_outputs();
        if !idle.put(instance) {
            self.host.metrics.recycled.inc();
        }
        // If the function was unloaded meanwhile, no later call clears its idle instances. And a call that waits for a
        // slot may have checked the idle instances before this one was put back. (Checked after `put`, so one of the
        // two sees the other.)
        if !self.is_loaded() || self.share.slots().is_waited_for() {
            idle.clear();
        }
    }

    /// Handles the end of the guest, before or after its answer.
    fn ended(&self, called: &Result<(), CallError>, memory: &mut MemoryUse) {
        self.host.metrics.memory_peak(memory.used());
        if let Err(error) = called {
            self.program.log.log_host_message(&error.to_string());
        }
        memory.end_call(called);
    }

    fn note(&self, result: &Result<(call::Answered, Timings), CallError>, recording: &Recording) {
        match result {
            Ok((_, timings)) => {
                self.warm().answered.inc();
                self.host.metrics.timings(timings);
                recording.record(|call| call.timings = Some(*timings));
            }
            Err(error) => {
                self.counter(error.into()).inc();
                if matches!(error, CallError::TimedOut { .. } | CallError::NoAnswer) {
                    self.program.log.log_host_message(&error.to_string());
                }
                recording.refused(error);
            }
        }
    }
}

/// Counts a call that its caller dropped.
struct CancelOnDrop {
    function: Arc<Function>,
    waits: bool,
    recording: Recording,
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if self.waits {
            self.function.counter(CallOutcome::Cancelled).inc();
            self.recording.abandoned();
        }
    }
}
