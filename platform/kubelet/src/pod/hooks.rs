//! Lifecycle hooks: actions that a container requests after its start and before its end.

use std::{sync::Arc, time::Duration};

use mayfly_api::k8s::api::core::v1::{Container, LifecycleHandler, Pod};
use mayfly_runtime::{ContainerId, Runtime};
use tokio::time::sleep;

use super::local::LocalPod;
use crate::probe::{
    exec,
    http_get::{HOOK_AGENT, HttpGet},
};

/// A hook of one attempt of a container.
pub(super) struct Hook {
    handler: LifecycleHandler,
    container: Container,
    id: ContainerId,
    address: Option<std::net::IpAddr>,
    runtime: Arc<dyn Runtime>,
}

/// The hook's point in the container's lifecycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LifecycleMoment {
    PostStart,
    PreStop,
}

impl Hook {
    pub(super) fn of(
        moment: LifecycleMoment,
        container: &Container,
        id: ContainerId,
        local: &LocalPod,
        runtime: &Arc<dyn Runtime>,
    ) -> Option<Self> {
        let lifecycle = container.lifecycle.as_ref()?;
        let handler = match moment {
            LifecycleMoment::PostStart => lifecycle.post_start.clone()?,
            LifecycleMoment::PreStop => lifecycle.pre_stop.clone()?,
        };
        let (container, runtime) = (container.clone(), runtime.clone());
        Some(Self { handler, container, id, address: local.address, runtime })
    }

    /// Runs the hook. Dropping the future kills its command.
    ///
    /// # Errors
    /// A message for the pod's events.
    pub(super) async fn run(&self) -> Result<(), String> {
        if let Some(action) = &self.handler.exec {
            let command = action.command.clone().unwrap_or_default();
            let shown = command.join(" ");
            let output = exec::output(&*self.runtime, &self.id, command).await?;
            return match output.exit_code {
                0 => Ok(()),
                code => Err(format!("command '{shown}' exited with {code}: {}", output.text)),
            };
        }
        if let Some(action) = &self.handler.http_get {
            // Any response counts as success, as in upstream.
            return HttpGet::of(action, &self.container, self.address, HOOK_AGENT)?.send().await.map(drop);
        }
        if let Some(action) = &self.handler.sleep {
            sleep(Duration::from_secs(u64::try_from(action.seconds).unwrap_or(0))).await;
            return Ok(());
        }
        Err("invalid handler: it is none of exec, httpGet and sleep".into())
    }
}

/// The containers of a pod by their names, sidecars and ephemeral ones included.
pub(super) fn container_named(pod: &Pod, name: &str) -> Option<Container> {
    let spec = pod.spec.as_ref()?;
    let listed = spec.containers.iter().chain(spec.init_containers.iter().flatten()).cloned();
    listed.chain(super::plan::ephemeral_containers(spec)).find(|container| container.name == name)
}
