//! `mayfly get`: objects in the server's own columns, or as data.

use std::time::Duration;

use clap::Args;
use futures::{AsyncBufReadExt as _, TryStreamExt as _};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    discovery::{DiscoveredKind, Discovery},
    failure::{ErrorCode, Failure},
    output::{self, OutputFormat},
    server::{Server, with_query},
    session::Session,
    table::{self, ServerTable, View},
};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  mayfly get functions
  mayfly get fn,rev,pods -A -o wide
  mayfly get function hello -o yaml")]
pub(crate) struct GetArgs {
    /// KIND [NAME…], or KIND/NAME…; several kinds with commas, as in functions,pods
    #[arg(value_name = "KIND [NAME]", required = true)]
    what: Vec<String>,
    /// In all namespaces
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Only objects with these labels, such as mayfly.dev/function=hello
    #[arg(short = 'l', long, value_name = "LABELS")]
    selector: Option<String>,
    /// Only objects with these fields, such as metadata.name=hello
    #[arg(long, value_name = "FIELDS")]
    field_selector: Option<String>,
    /// Keep running, and show every change
    #[arg(short, long)]
    watch: bool,
    /// Succeed when a named object does not exist
    #[arg(long)]
    ignore_not_found: bool,
    /// Include managedFields in JSON and YAML
    #[arg(long)]
    show_managed_fields: bool,
}

/// Objects of one kind: the named ones, or all.
#[derive(Debug)]
pub(crate) struct GetTarget {
    pub(crate) kind: DiscoveredKind,
    pub(crate) names: Vec<String>,
}

/// The status code when a resourceVersion is too old for a watch.
const EXPIRED: u16 = 410;

/// The page size of lists.
const PAGE: &str = "500";

/// Parses `KIND [NAME…]` and `KIND/NAME…`.
pub(crate) fn targets(discovery: &Discovery, words: &[String]) -> anyhow::Result<Vec<GetTarget>> {
    let Some(first) = words.first() else {
        return Err(Failure::error(ErrorCode::Usage, "no kind was named", "name one, such as functions"));
    };
    if !words.iter().any(|word| word.contains('/')) {
        let kinds = discovery.find_all(first)?;
        return Ok(kinds
            .into_iter()
            .map(|kind| GetTarget { kind: kind.clone(), names: words[1..].to_vec() })
            .collect());
    }
    let mut targets: Vec<GetTarget> = Vec::new();
    for word in words {
        let Some((kind, name)) = word.split_once('/').filter(|(_, name)| !name.is_empty()) else {
            return Err(Failure::error(
                ErrorCode::Usage,
                format!("{word:?} has no kind"),
                "write either KIND NAME NAME… or KIND/NAME KIND/NAME…",
            ));
        };
        let kind = discovery.find(kind)?;
        match targets.iter_mut().find(|target| target.kind == *kind) {
            Some(target) => target.names.push(name.into()),
            None => targets.push(GetTarget { kind: kind.clone(), names: vec![name.into()] }),
        }
    }
    Ok(targets)
}

/// Refuses a name together with a selector, since their meaning would be ambiguous.
pub(crate) fn named_or_selected(targets: &[GetTarget], selecting: Option<&str>) -> anyhow::Result<()> {
    let named = targets.iter().find_map(|target| target.names.first());
    let (Some(name), Some(flag)) = (named, selecting) else { return Ok(()) };
    let what = format!("{name} was named, and {flag} selects objects too");
    Err(Failure::error(ErrorCode::Usage, what, format!("leave out the name, or {flag}")))
}

pub(crate) async fn run(args: GetArgs, session: &Session) -> anyhow::Result<()> {
    let targets = targets(session.discovery().await?, &args.what)?;
    let labels = args.selector.as_ref().map(|_| "-l LABELS");
    named_or_selected(&targets, labels.or(args.field_selector.as_ref().map(|_| "--field-selector")))?;
    let server = session.server().await?;
    let namespace = session.namespace().await?;
    let namespace = if args.all_namespaces { None } else { Some(namespace.as_str()) };
    if args.all_namespaces && targets.iter().any(|target| !target.names.is_empty() && target.kind.namespaced)
    {
        return Err(Failure::error(
            ErrorCode::Usage,
            "a name is looked up in one namespace",
            "use -n NAMESPACE, or leave the name out",
        ));
    }
    let get = Get { args: &args, server, namespace, format: session.format() };
    if args.watch {
        let [target] = targets.as_slice() else {
            return Err(Failure::error(
                ErrorCode::Usage,
                "only one kind can be watched at a time",
                "name one kind with --watch",
            ));
        };
        return get.watch(target).await;
    }
    match get.format {
        OutputFormat::Json | OutputFormat::Yaml => get.data(&targets).await,
        OutputFormat::Table | OutputFormat::Wide | OutputFormat::Name => get.tables(&targets).await,
    }
}

/// One run of `get`.
struct Get<'a> {
    args: &'a GetArgs,
    server: &'a Server,
    namespace: Option<&'a str>,
    format: OutputFormat,
}

impl Get<'_> {
    async fn data(&self, targets: &[GetTarget]) -> anyhow::Result<()> {
        let mut objects = Vec::new();
        for GetTarget { kind, names } in targets {
            for name in names {
                let path = kind.object(self.namespace.unwrap_or_default(), name);
                objects.extend(self.unless_missing(self.server.get(&path).await)?);
            }
            if names.is_empty() {
                objects.extend(self.list(kind, self.args.field_selector.as_deref()).await?.0);
            }
        }
        let mut objects: Vec<_> = objects.into_iter().map(|object| self.as_data(object)).collect();
        let one = targets.len() == 1 && targets[0].names.len() == 1;
        let value = match one {
            true => match objects.pop() {
                Some(object) => object,
                None => return Ok(()),
            },
            false => json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": objects}),
        };
        output::result(self.format, &value, String::new)
    }

    /// All objects of a kind that match these fields, and the resourceVersion of the list.
    async fn list(
        &self,
        kind: &DiscoveredKind,
        fields: Option<&str>,
    ) -> anyhow::Result<(Vec<Value>, String)> {
        let (mut items, mut token) = (Vec::new(), String::new());
        loop {
            let mut page = self.server.get(&self.list_path(kind, fields, &token)).await?;
            if let Some(found) = page["items"].as_array_mut() {
                items.append(found);
            }
            for item in &mut items {
                // Items of a list lack their kind and apiVersion.
                if let Some(object) = item.as_object_mut() {
                    object.entry("apiVersion").or_insert_with(|| kind.api_version().into());
                    object.entry("kind").or_insert_with(|| kind.kind.clone().into());
                }
            }
            match page["metadata"]["continue"].as_str() {
                Some(next) if !next.is_empty() => token = next.to_owned(),
                _ => return Ok((items, resource_version(&page))),
            }
        }
    }

    async fn tables(&self, targets: &[GetTarget]) -> anyhow::Result<()> {
        let mut shown = 0;
        for GetTarget { kind, names } in targets {
            let Some(found) = self.table(kind, names).await?.filter(|table| !table.rows.is_empty()) else {
                continue;
            };
            if self.format == OutputFormat::Name {
                let names: Vec<_> =
                    found.rows.iter().map(|row| kind.full_name(row.metadata("name"))).collect();
                output::line(names.join("\n"))?;
            } else {
                let prefix = format!("{}/", kind.singular_name());
                let prefix = if targets.len() > 1 { prefix.as_str() } else { "" };
                let gap = if shown > 0 { "\n" } else { "" };
                output::out(format!("{gap}{}", found.render(self.view(kind, prefix))))?;
            }
            shown += 1;
        }
        if shown == 0 && !self.args.ignore_not_found {
            output::note(self.nothing(targets));
        }
        Ok(())
    }

    fn nothing(&self, targets: &[GetTarget]) -> String {
        let kinds: Vec<_> = targets.iter().map(|target| target.kind.plural.as_str()).collect();
        match self.namespace.filter(|_| targets.iter().any(|target| target.kind.namespaced)) {
            Some(namespace) => format!("no {} in namespace {namespace}", kinds.join(", ")),
            None => format!("no {}", kinds.join(", ")),
        }
    }

    fn view<'v>(&self, kind: &DiscoveredKind, prefix: &'v str) -> View<'v> {
        let with_namespace = self.namespace.is_none() && kind.namespaced;
        View { wide: self.format == OutputFormat::Wide, with_namespace, prefix }
    }

    /// The named objects, or all objects of the kind, in one table; `None` if all named objects are missing and that is
    /// allowed.
    async fn table(&self, kind: &DiscoveredKind, names: &[String]) -> anyhow::Result<Option<ServerTable>> {
        if names.is_empty() {
            return self.listed(kind, self.args.field_selector.as_deref()).await.map(Some);
        }
        let mut whole: Option<ServerTable> = None;
        for name in names {
            let path = kind.object(self.namespace.unwrap_or_default(), name);
            if let Some(found) = self.unless_missing(self.server.get_as(&path, table::ACCEPT).await)? {
                add(&mut whole, serde_json::from_value(found)?);
            }
        }
        Ok(whole)
    }

    /// All objects of a kind that match these fields, in one table.
    async fn listed(&self, kind: &DiscoveredKind, fields: Option<&str>) -> anyhow::Result<ServerTable> {
        let (mut whole, mut token) = (None, String::new());
        loop {
            let answer = self.server.get_as(&self.list_path(kind, fields, &token), table::ACCEPT).await?;
            let page: ServerTable = serde_json::from_value(answer)?;
            token.clone_from(&page.metadata.continue_token);
            add(&mut whole, page);
            if token.is_empty() {
                return Ok(whole.unwrap_or_default());
            }
        }
    }

    fn unless_missing(&self, answer: Result<Value, kube::Error>) -> Result<Option<Value>, kube::Error> {
        match answer {
            Err(error) if self.args.ignore_not_found && super::server::is_not_found(&error) => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// The object as data, without `managedFields` unless requested.
    fn as_data(&self, mut object: Value) -> Value {
        if !self.args.show_managed_fields
            && let Some(metadata) = object["metadata"].as_object_mut()
        {
            metadata.remove("managedFields");
        }
        object
    }

    fn list_path(&self, kind: &DiscoveredKind, fields: Option<&str>, token: &str) -> String {
        with_query(
            &kind.collection(self.namespace),
            &[
                ("limit", Some(PAGE)),
                ("labelSelector", self.args.selector.as_deref()),
                ("fieldSelector", fields),
                ("continue", Some(token).filter(|token| !token.is_empty())),
            ],
        )
    }

    /// The field selector of a watch for one object by name.
    fn watched_fields(&self, target: &GetTarget) -> anyhow::Result<Option<String>> {
        match target.names.as_slice() {
            [] => Ok(self.args.field_selector.clone()),
            [name] => Ok(Some(format!("metadata.name={name}"))),
            _ => Err(Failure::error(
                ErrorCode::Usage,
                "only one object, or all, can be watched",
                "name one object, or use -l LABELS",
            )),
        }
    }

    fn watch_path(&self, kind: &DiscoveredKind, fields: Option<&str>, version: &str) -> String {
        with_query(
            &kind.collection(self.namespace),
            &[
                ("watch", Some("true")),
                ("resourceVersion", Some(version)),
                ("allowWatchBookmarks", Some("true")),
                ("labelSelector", self.args.selector.as_deref()),
                ("fieldSelector", fields),
            ],
        )
    }

    /// Prints the current objects, then every change until Ctrl-C. When the server ends a watch, a new one continues at
    /// the last resourceVersion, or starts with a new list if that version is too old.
    async fn watch(&self, target: &GetTarget) -> anyhow::Result<()> {
        let fields = self.watched_fields(target)?;
        let fields = fields.as_deref();
        let mut screen = Screen::new(self, &target.kind);
        let mut version = screen.first(fields).await?;
        if !screen.shown
            && let [name] = target.names.as_slice()
        {
            let path = target.kind.object(self.namespace.unwrap_or_default(), name);
            self.unless_missing(self.server.get(&path).await)?;
        }
        loop {
            let started = Instant::now();
            let path = self.watch_path(&target.kind, fields, &version);
            let mut lines = match self.server.stream(&path, screen.accept()).await {
                Err(kube::Error::Api(status)) if status.code == EXPIRED => {
                    version = screen.first(fields).await?;
                    tokio::time::sleep_until(started + Duration::from_secs(1)).await;
                    continue;
                }
                stream => stream?.lines(),
            };
            while let Some(line) = lines.try_next().await? {
                let event: WatchEvent = serde_json::from_str(&line)?;
                if event.event_type == "ERROR" {
                    if event.object["code"] == EXPIRED {
                        version = screen.first(fields).await?;
                        break;
                    }
                    let message = event.object["message"].as_str().unwrap_or("the watch ended early");
                    return Err(Failure::error(ErrorCode::ServerError, message, "run the command again"));
                }
                if let Some(seen) = screen.event(&event)? {
                    version = seen;
                }
            }
            // Limits the rate of requests to a server that ends every watch at once.
            tokio::time::sleep_until(started + Duration::from_secs(1)).await;
        }
    }
}

fn add(whole: &mut Option<ServerTable>, page: ServerTable) {
    match whole {
        None => *whole = Some(page),
        Some(whole) => whole.extend(page),
    }
}

fn resource_version(object: &Value) -> String {
    object["metadata"]["resourceVersion"].as_str().unwrap_or("").to_owned()
}

#[derive(Deserialize)]
struct WatchEvent {
    #[serde(rename = "type")]
    event_type: String,
    object: Value,
}

/// The output of a watch.
struct Screen<'a> {
    get: &'a Get<'a>,
    kind: &'a DiscoveredKind,
    /// The columns: only the first table of a watch has them.
    columns: ServerTable,
    widths: Vec<u16>,
    titles_shown: bool,
    /// Whether any object was shown.
    shown: bool,
}

impl<'a> Screen<'a> {
    fn new(get: &'a Get<'a>, kind: &'a DiscoveredKind) -> Self {
        let columns = ServerTable::default();
        Self { get, kind, columns, widths: Vec::new(), titles_shown: false, shown: false }
    }

    fn is_data(&self) -> bool {
        matches!(self.get.format, OutputFormat::Json | OutputFormat::Yaml)
    }

    fn accept(&self) -> &'static str {
        if self.is_data() { "application/json" } else { table::ACCEPT }
    }

    /// Prints the current objects; returns the resourceVersion of the list, from which to watch: an object's own
    /// version may be too old.
    async fn first(&mut self, fields: Option<&str>) -> anyhow::Result<String> {
        if self.is_data() {
            let (objects, version) = self.get.list(self.kind, fields).await?;
            self.shown |= !objects.is_empty();
            for object in &objects {
                self.object(object)?;
            }
            return Ok(version);
        }
        let table = self.get.listed(self.kind, fields).await?;
        self.columns = table.without_rows();
        if !table.rows.is_empty() {
            self.shown = true;
            self.rows(&table)?;
        }
        Ok(table.metadata.resource_version)
    }

    fn object(&self, object: &Value) -> anyhow::Result<()> {
        let object = self.get.as_data(object.clone());
        output::out(match self.get.format {
            OutputFormat::Json => output::json(&object)?,
            _ => format!("---\n{}", output::yaml(&object)?),
        })?;
        Ok(())
    }

    fn rows(&mut self, table: &ServerTable) -> anyhow::Result<()> {
        if self.get.format == OutputFormat::Name {
            for row in &table.rows {
                output::line(self.kind.full_name(row.metadata("name")))?;
            }
            return Ok(());
        }
        let view = self.get.view(self.kind, "");
        let rows: Vec<_> = table.rows.iter().map(|row| self.columns.cells(row, view)).collect();
        let titles = if self.titles_shown { Vec::new() } else { self.columns.titles(view) };
        self.titles_shown = true;
        output::out(table::render_wider(&titles, &rows, &mut self.widths))?;
        Ok(())
    }

    /// Shows an event; returns the resourceVersion up to which events were seen.
    fn event(&mut self, event: &WatchEvent) -> anyhow::Result<Option<String>> {
        let is_change = event.event_type != "BOOKMARK";
        let mut seen = resource_version(&event.object);
        if self.is_data() {
            if is_change {
                self.object(&event.object)?;
            }
        } else {
            let table: ServerTable = serde_json::from_value(event.object.clone())?;
            if let Some(row) = table.rows.last() {
                seen = row.metadata("resourceVersion").to_owned();
            }
            if is_change {
                self.rows(&table)?;
            }
        }
        Ok(Some(seen).filter(|seen| !seen.is_empty()))
    }
}

#[cfg(test)]
mod tests {
    use super::{super::discovery, *};

    #[test]
    fn kinds_and_names() {
        let discovery = discovery::for_tests();
        let meant = |words: &[&str]| -> anyhow::Result<Vec<String>> {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            let targets = targets(&discovery, &words)?;
            Ok(targets.iter().map(|t| format!("{}:{}", t.kind.plural, t.names.join("+"))).collect())
        };
        assert_eq!(meant(&["fn"]).unwrap(), ["functions:"]);
        assert_eq!(meant(&["fn", "a", "b"]).unwrap(), ["functions:a+b"]);
        assert_eq!(meant(&["fn,po"]).unwrap(), ["functions:", "pods:"]);
        assert_eq!(meant(&["fn/a", "po/b", "fn/c"]).unwrap(), ["functions:a+c", "pods:b"]);
        for wrong in [&["fn/a", "b"][..], &["fn/"], &["nothing"], &[]] {
            assert!(meant(wrong).is_err(), "{wrong:?}");
        }
    }
}
