//! Due times, concurrency policies, deadlines and histories, as data.

use std::sync::Arc;

use kube::ResourceExt as _;
use mayfly_api::k8s::{
    api::batch::v1::{CronJob, Job},
    jiff::Timestamp,
};
use serde_json::{Value, json};

use super::plan::{CronJobPlan, plan, with_active};

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn cron_job(spec: Value, status: Value) -> CronJob {
    let mut object = json!({"metadata": {"name": "report", "namespace": "ns", "uid": "report",
            "creationTimestamp": "2026-01-01T10:00:00Z"},
        "spec": {"schedule": "*/10 * * * *", "jobTemplate": {"metadata": {"labels": {"app": "x"}},
            "spec": {"template": {"spec": {"containers": []}}}}},
        "status": status});
    for (name, value) in spec.as_object().unwrap() {
        object["spec"][name] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

fn job(name: &str, ended_as: Option<&str>, start: &str) -> Arc<Job> {
    let conditions: Vec<_> = ended_as.iter().map(|type_| json!({"type": type_, "status": "True"})).collect();
    let object = json!({"metadata": {"name": name, "uid": name}, "status": {"conditions": conditions,
        "startTime": start, "completionTime": ended_as.filter(|end| *end == "Complete").map(|_| start)}});
    Arc::new(serde_json::from_value(object).unwrap())
}

fn active(name: &str) -> Value {
    json!({"active": [{"name": name, "uid": name}], "lastScheduleTime": "2026-01-01T10:00:00Z"})
}

fn reasons(plan: &CronJobPlan) -> Vec<&'static str> {
    plan.notes.iter().map(|(_, reason, _)| *reason).collect()
}

fn deleted(plan: &CronJobPlan) -> Vec<String> {
    plan.delete.iter().map(|job| job.name_any()).collect()
}

#[test]
fn starts_the_most_recent_time_once() {
    let report = cron_job(json!({}), json!({}));
    let none = plan(&report, &[], at("2026-01-01T10:09:59Z"));
    assert!(none.create.is_none());
    assert_eq!(none.again.map(|left| left.as_secs()), Some(1));
    let plan_at = plan(&report, &[], at("2026-01-01T10:31:00Z"));
    let (job, due) = plan_at.create.unwrap();
    assert_eq!(due, at("2026-01-01T10:30:00Z"));
    assert_eq!(job.name_any(), format!("report-{}", due.as_second() / 60));
    assert_eq!(job.annotations()["batch.kubernetes.io/cronjob-scheduled-timestamp"], "2026-01-01T10:30:00Z");
    let mut created = job;
    created.metadata.uid = Some("u".into());
    let status = with_active(plan_at.status, &created, due);
    let report = CronJob { status: Some(status), ..report };
    let again = plan(&report, &[Arc::new(created)], at("2026-01-01T10:31:30Z"));
    assert!(again.create.is_none() && again.notes.is_empty());
}

#[test]
fn the_time_zone_counts() {
    let report = cron_job(
        json!({"schedule": "0 9 * * *", "timeZone": "Europe/Berlin"}),
        json!({"lastScheduleTime": "2026-06-01T07:00:00Z"}),
    );
    let plan_at = plan(&report, &[], at("2026-06-02T07:00:00Z"));
    let (job, _) = plan_at.create.unwrap();
    let time = &job.annotations()["batch.kubernetes.io/cronjob-scheduled-timestamp"];
    assert_eq!(time, "2026-06-02T09:00:00+02:00");
    let lost = cron_job(json!({"timeZone": "Europe/Atlantis"}), json!({}));
    let (_, reason, message) = &plan(&lost, &[], at("2026-01-01T10:31:00Z")).notes[0];
    let expected = "invalid timeZone: \"Europe/Atlantis\": unknown time zone Europe/Atlantis";
    assert_eq!((*reason, message.as_str()), ("UnknownTimeZone", expected));
}

#[test]
fn concurrency_policies() {
    let (now, running) = (at("2026-01-01T10:10:00Z"), [job("old", None, "2026-01-01T10:00:00Z")]);
    let with =
        |policy: &str| plan(&cron_job(json!({"concurrencyPolicy": policy}), active("old")), &running, now);
    let allow = with("Allow");
    assert!(allow.create.is_some() && allow.delete.is_empty() && allow.status.active.is_some());
    let forbid = with("Forbid");
    assert!(forbid.create.is_none());
    assert_eq!(reasons(&forbid), ["JobAlreadyActive"]);
    let replace = with("Replace");
    assert!(replace.create.is_some() && replace.status.active.is_none());
    assert_eq!(deleted(&replace), ["old"]);
}

#[test]
fn deadlines_suspension_and_long_absence() {
    let now = at("2026-01-01T10:15:00Z");
    let late = plan(&cron_job(json!({"startingDeadlineSeconds": 60}), json!({})), &[], now);
    assert!(late.create.is_none(), "five minutes late, one is allowed");
    assert!(plan(&cron_job(json!({"startingDeadlineSeconds": 600}), json!({})), &[], now).create.is_some());
    assert!(plan(&cron_job(json!({"suspend": true}), json!({})), &[], now).create.is_none());
    let absent = plan(&cron_job(json!({}), json!({})), &[], at("2026-01-03T10:15:00Z"));
    assert_eq!(reasons(&absent), ["TooManyMissedTimes"]);
    assert!(absent.create.is_some(), "only the last of them is started");
}

#[test]
fn histories_are_limited_and_ended_jobs_leave_the_list() {
    let jobs = [
        job("a", Some("Complete"), "2026-01-01T08:00:00Z"),
        job("b", Some("Complete"), "2026-01-01T08:10:00Z"),
        job("c", Some("Failed"), "2026-01-01T08:20:00Z"),
        job("d", Some("Failed"), "2026-01-01T08:30:00Z"),
    ];
    let spec = json!({"successfulJobsHistoryLimit": 1, "failedJobsHistoryLimit": 0});
    let plan_at = plan(&cron_job(spec, active("b")), &jobs, at("2026-01-01T10:05:00Z"));
    assert_eq!(deleted(&plan_at), ["a", "c", "d"]);
    assert_eq!(reasons(&plan_at), ["SawCompletedJob"]);
    assert_eq!(plan_at.status.active, None);
    assert_eq!(plan_at.status.last_successful_time.map(|time| time.0), Some(at("2026-01-01T08:10:00Z")));
    let manual =
        [job("manual", None, "2026-01-01T10:00:00Z"), job("report-29453400", None, "2026-01-01T10:00:00Z")];
    let unexpected = plan(&cron_job(json!({}), json!({})), &manual, at("2026-01-01T10:05:00Z"));
    assert_eq!(reasons(&unexpected), ["UnexpectedJob"], "the other has been created just now");
    assert!(unexpected.notes[0].2.ends_with("did not create or forgot: manual"));
    let missing = plan(&cron_job(json!({}), active("gone")), &[], at("2026-01-01T10:05:00Z"));
    assert_eq!(reasons(&missing), ["MissingJob"]);
}
