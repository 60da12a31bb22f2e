//! Programs: `wasi:cli/run`, run once to completion.

use std::sync::Arc;

use mayfly_api::wellknown::ANNOTATION_EGRESS;
use mayfly_runtime::{CallError, ContainerSpec, RuntimeError, SandboxSpec};
use tokio::time::Instant;
use wasmtime_wasi::I32Exit;

use super::{ContainerExit, EXIT_KILLED, Meter, Pods, RunningTask, task::StopRequest};
use crate::{
    cache::{CacheEntry, Pre},
    capability::{capture::Capture, egress::Egress, output::ProgramLog},
    failure,
    guest::GuestProgram,
    reuse::{self, Store},
    slots::InstanceSlot,
};

/// Exit code of a program that trapped, as shells report it (128 + SIGABRT).
const EXIT_TRAPPED: i32 = 134;

/// Starts a program.
pub(super) async fn start(
    pods: &Arc<Pods>,
    sandbox: &SandboxSpec,
    spec: ContainerSpec,
    component: Arc<CacheEntry>,
) -> Result<RunningTask, RuntimeError> {
    let share = pods.shared.cache.slots().share(&sandbox.pod.namespace, &sandbox.pod.name);
    let slot = match share.try_take() {
        Some(slot) => Some(slot),
        None => pods.shared.slot(&share, Instant::now() + pods.shared.config.slot_wait_max).await,
    };
    let Some(slot) = slot else {
        return Err(RuntimeError::NoRoom("this node has no room for another instance".into()));
    };
    let program = Arc::new(program(pods, sandbox, &spec)?);
    let log = program.log.clone();
    let meter = Meter::of_program(program.clone());
    // A program may compute without end: it never runs on the threads of the control plane.
    let mut running = program.lane.clone().spawn(meter.timed(run(component, program, slot)));
    let work = |mut stopping: StopRequest| async move {
        tokio::select! {
            biased;
            exit = &mut running => return exit,
            // Programs receive no signals, so waiting for the grace period would be useless.
            Ok(_) = stopping.wait_for(Option::is_some) => {}
        }
        running.cancel().await;
        ContainerExit::interrupted()
    };
    Ok(RunningTask::spawn(pods, spec.id, meter, work, move || log.write_capture()))
}

/// The program's configuration; the container's name is its first argument if the container has no command.
fn program(pods: &Pods, sandbox: &SandboxSpec, spec: &ContainerSpec) -> Result<GuestProgram, RuntimeError> {
    let shared = &pods.shared;
    let mut args = spec.command.clone();
    if args.is_empty() {
        args.push(spec.id.name.clone());
    }
    args.extend_from_slice(&spec.args);
    let log = ProgramLog::capturing(
        &shared.logs,
        spec.log_path.clone(),
        shared.config.log_bytes_per_second,
        spec.files.as_ref().map(|files| Capture::new(files.capture.clone())),
    );
    Ok(GuestProgram::new(
        args,
        spec.env.clone(),
        spec.memory_bytes_max.unwrap_or(shared.config.pod_memory_bytes_default),
        log,
        Arc::new(egress(pods, sandbox)?),
        shared.lane(&sandbox.pod.namespace, &sandbox.pod.name),
        shared.budget.clone(),
    )
    .with_files(spec.process.mounts.clone(), spec.files.clone()))
}

pub(super) fn egress(pods: &Pods, sandbox: &SandboxSpec) -> Result<Egress, RuntimeError> {
    Ok(pods.shared.egress(rules(sandbox)?, pods.shared.policies.of_pod(sandbox)))
}

/// The destinations that the pod's annotation lists.
pub(super) fn rules(sandbox: &SandboxSpec) -> Result<Vec<mayfly_api::egress::EgressRule>, RuntimeError> {
    let listed = sandbox.annotations.get(ANNOTATION_EGRESS).map(String::as_str).unwrap_or_default();
    listed
        .split(',')
        .map(str::trim)
        .filter(|rule| !rule.is_empty())
        .map(|rule| {
            rule.parse().map_err(|error| RuntimeError::Invalid(format!("{ANNOTATION_EGRESS}: {error}")))
        })
        .collect()
}

async fn run(component: Arc<CacheEntry>, program: Arc<GuestProgram>, slot: InstanceSlot) -> ContainerExit {
    let loaded = component.loaded();
    let mut store = reuse::store(&loaded.host, program.clone());
    let ran = match &loaded.pre {
        Pre::CommandWasi0_2(pre) => {
            async {
                let command = pre.instantiate_async(&mut store).await?;
                command.wasi_cli_run().call_run(&mut store).await
            }
            .await
        }
        Pre::CommandWasi0_3(pre) => {
            async {
                let command = pre.instantiate_async(&mut store).await?;
                store.run_concurrent(async |accessor| command.wasi_cli_run().call_run(accessor).await).await?
            }
            .await
        }
        Pre::HttpWasi0_2(_) | Pre::HttpWasi0_3(_) => unreachable!("those are started as services"),
    };
    let exit = exit(ran, &store);
    if exit.code != 0 && !exit.message.is_empty() {
        program.log.log_host_message(&exit.message);
    }
    drop(store);
    drop(slot);
    exit
}

fn exit(ran: wasmtime::Result<Result<(), ()>>, store: &Store) -> ContainerExit {
    let error = match ran {
        Ok(Ok(())) => return ContainerExit::completed(),
        Ok(Err(())) => return ContainerExit { code: 1, reason: "Error", message: String::new() },
        Err(error) => error,
    };
    match error.downcast_ref::<I32Exit>() {
        Some(I32Exit(0)) => return ContainerExit::completed(),
        Some(I32Exit(code)) => return ContainerExit { code: *code, reason: "Error", message: String::new() },
        None => {}
    }
    let error = failure::call_error(&error, &store.data().memory);
    let (code, reason) = match &error {
        CallError::OutOfMemory { .. } | CallError::Overloaded { .. } => (EXIT_KILLED, "OOMKilled"),
        _ => (EXIT_TRAPPED, "Error"),
    };
    ContainerExit { code, reason, message: error.to_string() }
}
