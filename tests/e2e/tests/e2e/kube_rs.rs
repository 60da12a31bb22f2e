//! kube-rs, the Rust client, against the running binary.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        authentication::v1::SelfSubjectReview,
        batch::v1::Job,
        core::v1::{ConfigMap, Pod, Secret},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, Config, Discovery, ResourceExt,
    api::{DeleteParams, DynamicObject, EvictParams, ListParams, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    discovery::Scope,
    runtime::{
        WatchStreamExt as _,
        wait::{await_condition, conditions},
        watcher,
    },
};
use mayfly_e2e::{Start, Up};
use serde_json::json;

const MANAGER: &str = "kube-rs-test";

async fn client(up: &Up) -> Result<Client> {
    let kubeconfig = Kubeconfig::read_from(up.kubeconfig())?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// Fails if something takes longer than a minute.
async fn soon<T>(what: &str, work: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(Duration::from_secs(60), work).await.with_context(|| format!("waiting for {what}"))
}

fn deployment() -> serde_json::Value {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "main", "image": "web:1"}]}}}})
}

#[tokio::test(flavor = "multi_thread")]
async fn workloads_are_applied_awaited_scaled_and_deleted() -> Result<()> {
    let up = Start::default().with(&["--simulated-nodes", "2"]).ready().await?;
    let client = client(&up).await?;
    ensure!(client.apiserver_version().await?.minor.starts_with("33"));

    let deployments: Api<Deployment> = Api::default_namespaced(client.clone());
    let apply = PatchParams::apply(MANAGER);
    let applied = deployments.patch("web", &apply, &Patch::Apply(deployment())).await?;
    let owner = applied.managed_fields().iter().find(|entry| entry.manager.as_deref() == Some(MANAGER));
    ensure!(owner.and_then(|entry| entry.operation.as_deref()) == Some("Apply"), "{applied:?}");
    let done = Box::pin(await_condition(deployments.clone(), "web", conditions::is_deployment_completed()));
    soon("the rollout", done).await??;

    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let of_web = ListParams::default().labels("app=web");
    let listed = pods.list(&of_web).await?;
    ensure!(listed.items.len() == 2, "{} pods", listed.items.len());
    let pod = listed.items.first().context("a pod")?.name_any();
    soon("a running pod", Box::pin(await_condition(pods.clone(), &pod, conditions::is_pod_running())))
        .await??;

    // Another manager's field is a conflict, unless it is taken by force.
    let mut other = deployment();
    other["spec"]["replicas"] = 3.into();
    let refused = deployments.patch("web", &PatchParams::apply("other"), &Patch::Apply(&other)).await;
    ensure!(matches!(&refused, Err(kube::Error::Api(status)) if status.code == 409), "{refused:?}");
    deployments.patch("web", &PatchParams::apply("other").force(), &Patch::Apply(&other)).await?;
    let scale = deployments.get_scale("web").await?;
    ensure!(scale.spec.and_then(|spec| spec.replicas) == Some(3));
    let scale = json!({"spec": {"replicas": 1}});
    deployments.patch_scale("web", &PatchParams::default(), &Patch::Merge(scale)).await?;
    let one_is_left = |found: Option<&Deployment>| {
        let status = found.and_then(|web| web.status.as_ref());
        status.is_some_and(|status| status.replicas == Some(1) && status.ready_replicas == Some(1))
    };
    soon("one replica", Box::pin(await_condition(deployments.clone(), "web", one_is_left))).await??;

    let pod = pods.list(&of_web).await?.items.first().context("a pod")?.clone();
    pods.evict(&pod.name_any(), &EvictParams::default()).await?;
    let uid = pod.uid().context("a uid")?;
    soon(
        "the eviction",
        Box::pin(await_condition(pods.clone(), &pod.name_any(), conditions::is_deleted(&uid))),
    )
    .await??;

    let uid = deployments.get("web").await?.uid().context("a uid")?;
    deployments.delete("web", &DeleteParams::foreground()).await?;
    soon("the deletion", Box::pin(await_condition(deployments, "web", conditions::is_deleted(&uid))))
        .await??;
    ensure!(pods.list(&of_web).await?.items.is_empty(), "its pods are deleted before it");
    up.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_ends_while_its_pods_are_watched() -> Result<()> {
    let up = Start::default().with(&["--simulated-nodes", "1"]).ready().await?;
    let client = client(&up).await?;
    let jobs: Api<Job> = Api::default_namespaced(client.clone());
    let template = json!({"metadata": {"annotations": {"simulated.mayfly.dev/run-seconds": "0.2"}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "work:1"}]}});
    let job = json!({"metadata": {"name": "work"}, "spec": {"completions": 2, "template": template}});
    let pods: Api<Pod> = Api::default_namespaced(client);
    let mut changes =
        watcher(pods, watcher::Config::default().labels("job-name=work")).applied_objects().boxed();
    jobs.create(&PostParams::default(), &serde_json::from_value(job)?).await?;
    let mut ended = std::collections::BTreeSet::new();
    while ended.len() < 2 {
        let pod = soon("a change of a pod", changes.try_next()).await??.context("the watch ended")?;
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if phase == Some("Succeeded") {
            ended.insert(pod.name_any());
        }
    }
    soon("the job", Box::pin(await_condition(jobs, "work", conditions::is_job_completed()))).await??;
    up.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn custom_kinds_are_discovered_and_errors_have_their_reasons() -> Result<()> {
    let up = Up::start().await?;
    let client = client(&up).await?;
    let review = Api::<SelfSubjectReview>::all(client.clone())
        .create(&PostParams::default(), &SelfSubjectReview::default())
        .await?;
    ensure!(review.status.and_then(|status| status.user_info?.username).is_some());

    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "cats.zoo.example"}, "spec": {"group": "zoo.example", "scope": "Namespaced",
            "names": {"kind": "Cat", "plural": "cats"}, "versions": [{"name": "v1", "served": true,
                "storage": true, "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                    "spec": {"type": "object", "properties": {"lives": {"type": "integer", "default": 9}}}}}}}]}});
    definitions.patch("cats.zoo.example", &PatchParams::apply(MANAGER), &Patch::Apply(definition)).await?;
    let established =
        await_condition(definitions.clone(), "cats.zoo.example", conditions::is_crd_established());
    soon("the definition", established).await??;
    let discovery = Discovery::new(client.clone()).run().await?;
    let group = discovery.get("zoo.example").context("the group is discovered")?;
    let (resource, capabilities) = group.recommended_kind("Cat").context("the kind is discovered")?;
    ensure!(capabilities.scope == Scope::Namespaced);
    let cats: Api<DynamicObject> = Api::default_namespaced_with(client.clone(), &resource);
    let cat = DynamicObject::new("tom", &resource).data(json!({"spec": {}}));
    let created = cats.create(&PostParams::default(), &cat).await?;
    ensure!(created.data["spec"]["lives"] == 9, "{:?}", created.data);

    // Pages, dry runs and the reasons of errors.
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    for number in 0..5 {
        let map = json!({"metadata": {"name": format!("page-{number}"), "labels": {"of": "pages"}}});
        maps.create(&PostParams::default(), &serde_json::from_value(map)?).await?;
    }
    let mut page = ListParams::default().labels("of=pages").limit(2);
    let mut names = Vec::new();
    loop {
        let list = maps.list(&page).await?;
        names.extend(list.items.iter().map(ResourceExt::name_any));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => break,
        }
    }
    ensure!(names == ["page-0", "page-1", "page-2", "page-3", "page-4"], "{names:?}");
    let secrets: Api<Secret> = Api::default_namespaced(client);
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    secrets.create(&dry, &serde_json::from_value(json!({"metadata": {"name": "dry"}}))?).await?;
    ensure!(secrets.get_opt("dry").await?.is_none());
    let map = serde_json::from_value(json!({"metadata": {"name": "page-0"}}))?;
    let again = maps.create(&PostParams::default(), &map).await;
    let Err(kube::Error::Api(status)) = again else { anyhow::bail!("{again:?}") };
    ensure!(status.code == 409 && status.reason == "AlreadyExists", "{status:?}");
    up.stop().await
}
