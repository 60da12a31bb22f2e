//! All controllers of one process.

use kube::Client;
use mayfly_api::k8s::api::{apps::v1::ReplicaSet, core::v1::ReplicationController};
use mayfly_informer::Informers;
use tokio_util::sync::CancellationToken;

use crate::{
    artifacts, autoscaler, certificate_signing, cron_job, csi, daemon_set, deployment, disruption, endpoints,
    events, function, garbage, job, job_queue, load_balancer, namespace_defaults, node, node_approval,
    node_ipam, persistent_volume, pods, replica_set, stateful_set,
};

/// The settings of all controllers.
#[derive(Clone, Debug, Default)]
pub struct Config {
    pub function: function::Config,
    pub certificate_signing: certificate_signing::Config,
    pub cron_job: cron_job::Config,
    pub csi: csi::Config,
    pub deployment: deployment::Config,
    pub endpoints: endpoints::Config,
    pub namespace_defaults: namespace_defaults::Config,
    pub autoscaler: autoscaler::Config,
    pub daemon_set: daemon_set::Config,
    pub stateful_set: stateful_set::Config,
    pub disruption: disruption::Config,
    pub replica_set: replica_set::Config,
    pub job: job::Config,
    pub job_queue: job_queue::Config,
    pub load_balancer: load_balancer::Config,
    pub garbage: garbage::Config,
    pub node: node::Config,
    /// `None`: certificate requests of nodes are approved by users.
    pub node_approval: Option<node_approval::NodeApproval>,
    /// `None`: nodes get no ranges of pod addresses.
    pub node_ipam: Option<node_ipam::NodeIpam>,
    pub persistent_volume: persistent_volume::Config,
    pub pods: pods::Config,
    pub artifacts: artifacts::Config,
    pub events: events::Config,
}

/// Every controller, ready to run.
pub struct Controllers {
    function: function::FunctionController,
    certificate_signing: certificate_signing::CertificateSigningController,
    cron_job: cron_job::CronJobController,
    csi: csi::CsiController,
    deployment: deployment::DeploymentController,
    endpoints: endpoints::EndpointsController,
    namespace_defaults: namespace_defaults::NamespaceDefaultsController,
    autoscaler: autoscaler::AutoscalerController,
    daemon_set: daemon_set::DaemonSetController,
    stateful_set: stateful_set::StatefulSetController,
    disruption: disruption::DisruptionController,
    replica_set: replica_set::ReplicaSetController<ReplicaSet>,
    replication: replica_set::ReplicaSetController<ReplicationController>,
    job: job::JobController,
    job_queue: job_queue::JobQueueController,
    load_balancer: load_balancer::LoadBalancerController,
    garbage: garbage::GarbageCollector,
    node: node::NodeController,
    node_approval: node_approval::NodeApprovalController,
    node_ipam: node_ipam::NodeIpamController,
    persistent_volume: persistent_volume::PersistentVolumeController,
    pods: pods::PodCollector,
    artifacts: artifacts::ArtifactCollector,
    events: events::EventCollector,
}

impl std::fmt::Debug for Controllers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controllers").finish_non_exhaustive()
    }
}

impl Controllers {
    /// Starts the informers it needs; acts on nothing yet. Must be called inside a tokio runtime.
    pub fn create(config: Config, client: Client, informers: &Informers) -> Self {
        Self {
            function: function::FunctionController::create(config.function, client.clone(), informers),
            certificate_signing: certificate_signing::CertificateSigningController::create(
                config.certificate_signing,
                client.clone(),
                informers,
            ),
            cron_job: cron_job::CronJobController::create(config.cron_job, client.clone(), informers),
            csi: csi::CsiController::create(config.csi, client.clone(), informers),
            deployment: deployment::DeploymentController::create(
                config.deployment,
                client.clone(),
                informers,
            ),
            endpoints: endpoints::EndpointsController::create(config.endpoints, client.clone(), informers),
            namespace_defaults: namespace_defaults::NamespaceDefaultsController::create(
                config.namespace_defaults,
                client.clone(),
                informers,
            ),
            autoscaler: autoscaler::AutoscalerController::create(
                config.autoscaler,
                client.clone(),
                informers,
            ),
            daemon_set: daemon_set::DaemonSetController::create(config.daemon_set, client.clone(), informers),
            stateful_set: stateful_set::StatefulSetController::create(
                config.stateful_set,
                client.clone(),
                informers,
            ),
            disruption: disruption::DisruptionController::create(
                config.disruption,
                client.clone(),
                informers,
            ),
            replica_set: replica_set::ReplicaSetController::create(
                config.replica_set.clone(),
                client.clone(),
                informers,
            ),
            replication: replica_set::ReplicaSetController::create(
                config.replica_set,
                client.clone(),
                informers,
            ),
            job: job::JobController::create(config.job, client.clone(), informers),
            job_queue: job_queue::JobQueueController::create(config.job_queue, client.clone(), informers),
            load_balancer: load_balancer::LoadBalancerController::create(
                config.load_balancer,
                client.clone(),
                informers,
            ),
            garbage: garbage::GarbageCollector::create(config.garbage, client.clone()),
            node: node::NodeController::create(config.node, client.clone(), informers),
            node_approval: node_approval::NodeApprovalController::create(
                config.node_approval,
                client.clone(),
                informers,
            ),
            node_ipam: node_ipam::NodeIpamController::create(config.node_ipam, client.clone(), informers),
            persistent_volume: persistent_volume::PersistentVolumeController::create(
                config.persistent_volume,
                client.clone(),
                informers,
            ),
            pods: pods::PodCollector::create(config.pods, client.clone(), informers),
            artifacts: artifacts::ArtifactCollector::create(config.artifacts, client.clone(), informers),
            events: events::EventCollector::create(config.events, client),
        }
    }

    /// Runs until `stop`, then lets the work in progress end. Each controller waits for its own informers, and none
    /// waits for another.
    pub async fn run(self, stop: CancellationToken) {
        tokio::join!(
            self.function.run(stop.clone()),
            self.deployment.run(stop.clone()),
            self.endpoints.run(stop.clone()),
            self.namespace_defaults.run(stop.clone()),
            self.certificate_signing.run(stop.clone()),
            self.cron_job.run(stop.clone()),
            self.csi.run(stop.clone()),
            self.replication.run(stop.clone()),
            self.autoscaler.run(stop.clone()),
            self.daemon_set.run(stop.clone()),
            self.stateful_set.run(stop.clone()),
            self.disruption.run(stop.clone()),
            self.replica_set.run(stop.clone()),
            self.job.run(stop.clone()),
            self.job_queue.run(stop.clone()),
            self.load_balancer.run(stop.clone()),
            self.garbage.run(stop.clone()),
            self.node.run(stop.clone()),
            self.node_approval.run(stop.clone()),
            self.node_ipam.run(stop.clone()),
            self.persistent_volume.run(stop.clone()),
            self.pods.run(stop.clone()),
            self.artifacts.run(stop.clone()),
            self.events.run(stop),
        );
    }
}
