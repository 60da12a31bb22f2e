//! The output of `mayfly up` on stdout when it is ready: addresses, and the next commands.

use std::path::Path;

use anyhow::Context as _;
use mayfly_apiserver::Identity;
use mayfly_cli::data_dir::{DataDir, Endpoints};
use tokio::sync::watch;

use super::data_files::write_private;

/// Each line can be copied into a shell without changes.
pub(super) fn text(endpoints: &Endpoints, data_dir: &DataDir) -> String {
    let Endpoints { api, http, https: _, workflows, admin } = endpoints;
    let address = |url: &Option<String>| url.as_deref().unwrap_or("-").to_owned();
    let (workflows, admin) = (address(workflows), address(admin));
    format!(
        "mayfly is up\n  \
           API        {api}\n  \
           functions  {http}/fn/<namespace>/<name>/\n  \
           workflows  {workflows}\n  \
           admin      {admin}  (/healthz /readyz /metrics)\n  \
           data       {}\n\n  \
           export KUBECONFIG={}\n  \
           mayfly new rust hello && cd hello && mayfly deploy\n  \
           AWS_ACCESS_KEY_ID=x AWS_SECRET_ACCESS_KEY=x \\\n    \
             aws stepfunctions --region us-east-1 --endpoint-url {workflows} list-state-machines",
        data_dir.path().display(),
        shell_word(&data_dir.kubeconfig()),
    )
}

/// Quotes a path as one word of a shell.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@%:,=".contains(c);
    match text.chars().all(is_plain) {
        true => text,
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// Publishes the addresses when functions can be called: files for programs, a banner for users. `join_command` starts a
/// machine that joins.
pub(super) fn announce(
    data_dir: &DataDir,
    identity: &Identity,
    endpoints: &Endpoints,
    join_command: Option<&str>,
    ready: &watch::Sender<bool>,
) -> anyhow::Result<()> {
    let kubeconfig = data_dir.kubeconfig();
    write_private(&kubeconfig, &identity.kubeconfig(&endpoints.api))
        .with_context(|| format!("cannot write {}", kubeconfig.display()))?;
    endpoints
        .write(&data_dir.endpoints())
        .with_context(|| format!("cannot write {}", data_dir.endpoints().display()))?;
    // On a terminal the banner below contains the same.
    if !std::io::IsTerminal::is_terminal(&std::io::stderr()) {
        tracing::info!(
            api = endpoints.api,
            functions = endpoints.http,
            https = endpoints.https,
            workflows = endpoints.workflows,
            admin = endpoints.admin,
            data = %data_dir.path().display(),
            "mayfly is up"
        );
    }
    ready.send_replace(true);
    say(&text(endpoints, data_dir));
    if let Some(command) = join_command {
        say(&format!("\n  another machine joins with\n  {command}"));
    }
    Ok(())
}

fn say(text: &str) {
    use std::io::Write as _;
    // Ignore a closed stdout.
    let _ = writeln!(std::io::stdout(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_says_can_be_typed_anywhere() {
        let endpoints = Endpoints {
            api: "https://127.0.0.1:6443".into(),
            http: "http://127.0.0.1:8080".into(),
            https: None,
            workflows: Some("http://127.0.0.1:8083".into()),
            admin: None,
        };
        let said = text(&endpoints, &DataDir::resolve(Some("./data".into())));
        let here = std::env::current_dir().unwrap();
        let export = format!("\n  export KUBECONFIG={}\n", shell_word(&here.join("data/kubeconfig")));
        assert!(said.contains(&export), "{said}");
        let aws =
            "aws stepfunctions --region us-east-1 --endpoint-url http://127.0.0.1:8083 list-state-machines";
        assert!(said.ends_with(aws), "{said}");
        let quoted = |text: &str| shell_word(Path::new(text));
        assert_eq!(quoted("/my data/it's"), r"'/my data/it'\''s'");
        assert_eq!(quoted("/var/lib/mayfly"), "/var/lib/mayfly");
    }
}
