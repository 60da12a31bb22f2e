//! `mayfly dev`: build and deploy on every save, and follow the logs.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use clap::Args;
use mayfly_api::duration::Span;
use notify::{EventKind, RecursiveMode, Watcher as _};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};

use super::{
    build, deploy,
    deploy::{Deployed, Settings},
    failure, format, logs, output,
    server::is_unanswered,
    session::Session,
};
use crate::guest::project::Project;

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly dev
  mayfly dev handler.py
  mayfly dev ./hello --env GREETING=hi")]
pub(crate) struct DevArgs {
    /// The project: a folder, or a script with a handler
    #[arg(default_value = ".", value_name = "DIR|SCRIPT[:HANDLER]")]
    directory: PathBuf,
    #[command(flatten)]
    settings: Settings,
    /// How long to wait until the function is ready
    #[arg(long, default_value = "60s", value_name = "DURATION")]
    wait_timeout: Span,
}

/// Editors save in several steps: a build begins when nothing was written for this long…
const QUIET: Duration = Duration::from_millis(150);
/// …or after this long, when writing never stops.
const QUIET_MAX: Duration = Duration::from_secs(2);
/// The pause before the log is requested again after it ended.
const LOG_PAUSE: Duration = Duration::from_secs(1);
/// The pause before a server that does not answer is contacted again.
const SERVER_PAUSE: Duration = Duration::from_secs(2);

pub(crate) async fn run(args: DevArgs, session: &Session) -> anyhow::Result<()> {
    session.server().await?;
    let directory = Project::folder(&args.directory).map_err(|error| {
        failure::Failure::error(format!("{error:#}"), "name a project's directory; mayfly new makes one")
    })?;
    // Saving a file cannot make a project of the folder.
    if !directory.join("Cargo.toml").is_file() {
        Project::load(&args.directory)?;
    }
    // One place is enough: a further change while one is waiting to be built starts the same build.
    let (saved, mut saves) = mpsc::channel(1);
    let _watcher = watcher(&directory, saved)?;
    output::note(format_args!("watching {}; Ctrl-C ends it", directory.display()));
    let (deployed, known) = watch::channel(None);
    tokio::select! {
        never = rebuild(&args.directory, &args, session, &deployed, &mut saves) => never,
        never = follow(session, known) => never,
        signal = tokio::signal::ctrl_c() => signal.context("cannot hear Ctrl-C")?,
    }
    let deployed = deployed.borrow();
    match deployed.as_ref() {
        Some(Deployed { name, namespace, .. }) => output::note(format_args!(
            "\nfunction {name} stays deployed; remove it with: mayfly delete function {name} -n {namespace}"
        )),
        None => output::note("\nnothing was deployed"),
    }
    Ok(())
}

/// Builds and deploys, at once and after every save.
async fn rebuild(
    directory: &Path,
    args: &DevArgs,
    session: &Session,
    deployed: &watch::Sender<Option<Deployed>>,
    saves: &mut mpsc::Receiver<()>,
) -> ! {
    loop {
        match round(directory, args, session).await {
            Ok(now) => {
                deployed.send_replace(Some(now));
            }
            Err(error) => {
                let is_away = is_away(&error);
                output::note(format_args!("error: {}", failure::text(&session.explain(error))));
                if is_away {
                    let pause = format::seconds(SERVER_PAUSE.as_secs_f64());
                    output::note(format_args!("trying again every {pause} until a server answers"));
                    until_it_answers(session).await;
                    continue;
                }
                output::note("waiting for the next save");
            }
        }
        saves.recv().await;
        settle(saves).await;
    }
}

/// Whether no server answered: saving does not help then, a server does.
fn is_away(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(is_unanswered)
}

/// Waits until the server answers any request.
async fn until_it_answers(session: &Session) {
    loop {
        sleep(SERVER_PAUSE).await;
        let Ok(server) = session.server().await else { continue };
        if !server.get("/version").await.is_err_and(|error| is_unanswered(&error)) {
            return;
        }
    }
}

/// One build and deployment. Contacts the server first, which fails sooner than a build.
async fn round(directory: &Path, args: &DevArgs, session: &Session) -> anyhow::Result<Deployed> {
    let started = Instant::now();
    let source = directory.to_owned();
    deploy::answers(session, &Project::load(directory)?.manifest).await?;
    let built = tokio::task::spawn_blocking(move || build::project(&source)).await??;
    let built_in = started.elapsed();
    let patience = Some(args.wait_timeout.0);
    let deployed = deploy::deploy(session, &built.into(), &args.settings, patience).await?;
    let seconds = |span: Duration| format::seconds(span.as_secs_f64());
    output::note(format_args!(
        "{} answers at {} (built in {}, deployed in {})",
        deployed.revision.as_deref().unwrap_or(&deployed.name),
        deployed.url,
        seconds(built_in),
        seconds(started.elapsed() - built_in)
    ));
    Ok(deployed)
}

/// Prints the function's log, over all revisions, as soon as there is one. A log that breaks off is requested again.
async fn follow(session: &Session, mut known: watch::Receiver<Option<Deployed>>) -> ! {
    let path = match known.wait_for(Option::is_some).await {
        Ok(deployed) => {
            deployed.as_ref().map(|d| logs::follow_path(&d.namespace, &d.name)).unwrap_or_default()
        }
        // The sender lives as long as the command.
        Err(_) => std::future::pending().await,
    };
    loop {
        if let Err(error) = logs::copy(session, &path).await {
            output::note(format_args!("logs: {}", failure::text(&session.explain(error))));
        }
        sleep(LOG_PAUSE).await;
    }
}

/// Waits until saving has stopped.
async fn settle(saves: &mut mpsc::Receiver<()>) {
    let latest = Instant::now() + QUIET_MAX;
    while Instant::now() < latest && timeout(QUIET, saves.recv()).await.is_ok() {}
}

/// Tells of changes below a directory, builds' own products excepted.
fn watcher(directory: &Path, saved: mpsc::Sender<()>) -> anyhow::Result<notify::RecommendedWatcher> {
    let root = directory.to_owned();
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        let matters = match event {
            Ok(event) => {
                !matches!(event.kind, EventKind::Access(_))
                    && event.paths.iter().any(|path| is_source(&root, path))
            }
            // Events were lost: something may have changed.
            Err(_) => true,
        };
        if matters {
            // Full: the build that waits will see this change as well.
            let _ = saved.try_send(());
        }
    })
    .context("cannot watch files")?;
    watcher.watch(directory, RecursiveMode::Recursive).map_err(|error| {
        failure::Failure::error(
            format!("cannot watch {}: {error}", directory.display()),
            "too many watched files? raise fs.inotify.max_user_watches",
        )
    })?;
    Ok(watcher)
}

/// Whether a change of this path calls for a build.
fn is_source(root: &Path, path: &Path) -> bool {
    let Ok(inner) = path.strip_prefix(root) else { return false };
    let mut parts = inner.components().map(|part| part.as_os_str().to_string_lossy());
    let is_product = parts.any(|part| {
        part == "target" || part == "node_modules" || part == "__pycache__" || part.starts_with('.')
    });
    let name = inner.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    // Cargo and npm write their lock files while they build; editors write backups.
    let is_noise = matches!(&*name, "Cargo.lock" | "package-lock.json")
        || name.ends_with('~')
        || name.ends_with(".wasm")
        || name == "4913";
    !is_product && !is_noise && !inner.as_os_str().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_and_noise_are_no_sources() {
        let root = Path::new("/p");
        for (path, expected) in [
            ("/p/src/lib.rs", true),
            ("/p/Cargo.toml", true),
            ("/p/assets/page.html", true),
            ("/p/target/debug/x.rs", false),
            ("/p/.git/HEAD", false),
            ("/p/.mayfly/sdk/lib.rs", false),
            ("/p/src/.lib.rs.swp", false),
            ("/p/src/lib.rs~", false),
            ("/p/Cargo.lock", false),
            ("/p/hello.wasm", false),
            ("/p", false),
            ("/elsewhere/src/lib.rs", false),
        ] {
            assert_eq!(is_source(root, Path::new(path)), expected, "{path}");
        }
    }

    #[tokio::test]
    async fn a_save_is_heard_and_settles() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("target")).unwrap();
        let (saved, mut saves) = mpsc::channel(1);
        let _watcher = watcher(&root, saved).unwrap();
        std::fs::write(root.join("target/x"), "1").unwrap();
        std::fs::write(root.join("lib.rs"), "1").unwrap();
        timeout(Duration::from_secs(10), saves.recv()).await.unwrap().unwrap();
        settle(&mut saves).await;
        std::fs::write(root.join("lib.rs"), "2").unwrap();
        timeout(Duration::from_secs(10), saves.recv()).await.unwrap().unwrap();
    }

    /// Changes are reported in order, and a removal once: the earlier reports were about the build's product.
    #[tokio::test]
    async fn a_product_is_no_news() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("target")).unwrap();
        std::fs::write(root.join("one.rs"), "").unwrap();
        std::fs::write(root.join("two.rs"), "").unwrap();
        let (saved, mut saves) = mpsc::channel(64);
        let _watcher = watcher(&root, saved).unwrap();
        for content in ["1", "2", "3"] {
            std::fs::write(root.join("target/x"), content).unwrap();
        }
        for source in ["one.rs", "two.rs"] {
            std::fs::remove_file(root.join(source)).unwrap();
            timeout(Duration::from_secs(10), saves.recv()).await.unwrap().unwrap();
        }
        assert!(saves.try_recv().is_err(), "the product was told too");
    }
}
