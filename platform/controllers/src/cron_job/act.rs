//! Carries out the steps of [`super::plan`]: creates and deletes Jobs, writes the status.

use std::sync::Arc;

use kube::{
    Api, Client, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use mayfly_api::{
    ObjectKey,
    k8s::{
        api::batch::v1::{CronJob, CronJobStatus, Job},
        jiff::Timestamp,
    },
};
use mayfly_informer::{
    EventRecorder, Index, Informer, Informers,
    reconcile::{self, Outcome, WorkQueue},
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{
    Config,
    plan::{CronJobPlan, plan, with_active},
};
use crate::metadata::{
    BY_CONTROLLER, api_message, by_controller, controller_of, is_gone, only, uid, with_explicit_nulls,
};

/// Starts the Jobs of every CronJob.
pub(crate) struct CronJobController {
    config: Config,
    client: Client,
    cron_jobs: Informer<CronJob>,
    jobs: Informer<Job>,
    jobs_by_controller: Index<Job>,
}

impl CronJobController {
    pub(crate) fn create(config: Config, client: Client, informers: &Informers) -> Self {
        let jobs = informers.of::<Job>();
        let jobs_by_controller = jobs.index(BY_CONTROLLER, by_controller);
        Self { config, client, cron_jobs: informers.of(), jobs, jobs_by_controller }
    }

    pub(crate) async fn run(self, stop: CancellationToken) {
        let synced = async {
            self.cron_jobs.synced().await;
            self.jobs.synced().await;
        };
        if stop.run_until_cancelled(synced).await.is_none() {
            return;
        }
        let events = EventRecorder::start(self.client.clone(), "cronjob-controller", None, stop.clone());
        let queue = WorkQueue::default();
        let changed = queue.clone();
        self.cron_jobs.handle(move |change| changed.add(ObjectKey::of(&**change.latest())));
        let changed = queue.clone();
        self.jobs.handle(move |change| {
            let job = change.latest();
            if let Some(owner) = controller_of(&**job).filter(|owner| owner.kind == "CronJob") {
                changed.add(ObjectKey::new(job.namespace().unwrap_or_default(), &owner.name));
            }
        });
        let workers_max = self.config.workers_max;
        let controller = Arc::new(self);
        reconcile::run("cronjob", queue, workers_max, stop, move |key| {
            let (controller, events) = (controller.clone(), events.clone());
            async move { controller.reconcile(key, &events).await }
        })
        .await;
    }

    async fn reconcile(&self, key: ObjectKey, events: &EventRecorder) -> kube::Result<Outcome> {
        let Some(cron_job) = self.cron_jobs.get(&key) else { return Ok(Outcome::Done) };
        let jobs = self.jobs_by_controller.get(uid(&*cron_job));
        let plan = plan(&cron_job, &jobs, Timestamp::now());
        self.carry_out(&key, &cron_job, plan, events).await
    }

    async fn carry_out(
        &self,
        key: &ObjectKey,
        cron_job: &CronJob,
        plan: CronJobPlan,
        events: &EventRecorder,
    ) -> kube::Result<Outcome> {
        let jobs: Api<Job> = Api::namespaced(self.client.clone(), &key.namespace);
        for (warning, reason, message) in plan.notes {
            match warning {
                true => events.warning(cron_job, reason, message),
                false => events.normal(cron_job, reason, message),
            }
        }
        for job in &plan.delete {
            let result = jobs.delete(&job.name_any(), &only(uid(&**job))).await;
            if !is_gone(&result) {
                result?;
                events.normal(cron_job, "SuccessfulDelete", format!("Deleted job {}", job.name_any()));
            }
        }
        let mut status = plan.status;
        if let Some((job, due)) = plan.create {
            status = match jobs.create(&PostParams::default(), &job).await {
                Ok(created) => {
                    events.normal(
                        cron_job,
                        "SuccessfulCreate",
                        format!("Created job {}", created.name_any()),
                    );
                    with_active(status, &created, due)
                }
                // Created by an earlier attempt whose status was not written, or the name belongs to another owner.
                Err(kube::Error::Api(error)) if error.is_already_exists() => {
                    let known = jobs.get(&job.name_any()).await?;
                    if controller_of(&known).is_none_or(|owner| owner.uid != uid(cron_job)) {
                        let message =
                            format!("Job {} exists and is not controlled by this CronJob", job.name_any());
                        events.warning(cron_job, "FailedCreate", message);
                    }
                    with_active(status, &known, due)
                }
                Err(error) => {
                    let message = format!("Error creating job: {}", api_message(&error));
                    events.warning(cron_job, "FailedCreate", message);
                    return Err(error);
                }
            };
        }
        self.write_status(key, cron_job, &status).await?;
        Ok(plan.again.map_or(Outcome::Done, Outcome::RequeueAfter))
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        cron_job: &CronJob,
        status: &CronJobStatus,
    ) -> kube::Result<()> {
        if cron_job.status.clone().unwrap_or_default() == *status {
            return Ok(());
        }
        let api: Api<CronJob> = Api::namespaced(self.client.clone(), &key.namespace);
        // Conditional on the version that was planned from: a stale copy must not forget the last schedule time.
        let metadata = json!({"resourceVersion": cron_job.metadata.resource_version});
        let status = with_explicit_nulls(status, &["active", "lastScheduleTime", "lastSuccessfulTime"]);
        let patch = Patch::Merge(json!({"metadata": metadata, "status": status}));
        let result = api.patch_status(&key.name, &PatchParams::default(), &patch).await;
        if !is_gone(&result) {
            result?;
        }
        Ok(())
    }
}
