//! The Python client `kubernetes` against the running binary.

use anyhow::{Result, ensure};
use mayfly_e2e::{Up, skipped, test_name};

use crate::{
    aws_clients::{python_or_skip, script},
    containers::{ContainerNode, containers_or_skip},
};

/// Runs a script of the folder `python_client` with a kubeconfig; its last line must be `expected`.
async fn passes(python: &str, file: &str, up: &Up, expected: &str) -> Result<()> {
    let file = format!("tests/e2e/python_client/{file}");
    let kubeconfig = up.kubeconfig();
    let printed = script(python, &file, &kubeconfig.to_string_lossy(), up).await?;
    ensure!(printed.trim() == expected, "{printed}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_client_manages_objects() -> Result<()> {
    let Some(python) = python_or_skip(test_name!(), "kubernetes").await else { return Ok(()) };
    let up = Up::start().await?;
    passes(&python, "objects.py", &up, "objects as the Python client sees them").await?;
    up.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_client_reaches_into_a_pod() -> Result<()> {
    containers_or_skip!();
    let Some(python) = python_or_skip(test_name!(), "kubernetes").await else { return Ok(()) };
    let node = ContainerNode::start().await?;
    passes(&python, "pods.py", &node.kubectl.up, "a pod as the Python client sees it").await?;
    node.leaves_nothing().await
}
