//! `flexcomm doctor`.

use flexcomm_agent::doctor::{self, Group, Options, State};
use std::path::PathBuf;

/// Arguments of `flexcomm doctor`.
#[derive(clap::Args)]
#[command(after_help = "\
Exit status: 0 when all that is needed is here (warnings allowed), 1 otherwise.

Examples:
  flexcomm doctor                                       look at everything
  flexcomm doctor --for agent --controller http://ctl:7070   what an agent on this node needs
  flexcomm doctor --for lab --json                      what the lab needs, for a script")]
pub struct Args {
    /// What is to run on this machine; several by commas.
    #[arg(long = "for", value_enum, value_delimiter = ',', default_values_t = [Purpose::Agent, Purpose::Shaping, Purpose::Lab])]
    purposes: Vec<Purpose>,
    /// A controller that must answer, for example http://127.0.0.1:7070, or HOST or HOST:PORT of one; not looked at when absent.
    #[arg(long, value_name = "URL", env = "FLEXCOMM_CONTROLLER")]
    controller: Option<String>,
    /// Where the agent will keep its spool and tc's journal.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/flexcomm")]
    state_dir: PathBuf,
    /// Where the agent will keep its socket.
    #[arg(long, value_name = "DIR", default_value = "/run/flexcomm")]
    run_dir: PathBuf,
    /// Folder of the Fashion-MNIST files that the lab trains on.
    #[arg(long, value_name = "DIR", default_value = "/usr/share/datasets/fashion-mnist")]
    data: PathBuf,
    /// One JSON object: {"ok", "checks": [{"group", "name", "state", "found", "mend"}]}.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Purpose {
    /// The agent on a node of a cluster.
    Agent,
    /// An agent that shapes its link.
    Shaping,
    /// The emulated cluster on this machine.
    Lab,
}

/// Port that a controller listens on unless it is told another.
const PORT: u16 = 7070;

/// A URL as it is; HOST and HOST:PORT as that of a controller there.
pub(crate) fn controller_url(text: &str) -> String {
    let text = text.trim();
    let has_port = text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) && !text.ends_with(']');
    match (text.contains("://"), has_port) {
        (true, _) => text.to_owned(),
        (false, true) => format!("http://{text}"),
        (false, false) => format!("http://{text}:{PORT}"),
    }
}

/// Runs `flexcomm doctor`.
pub fn run(args: Args) -> anyhow::Result<()> {
    let group = |purpose: &Purpose| match purpose {
        Purpose::Agent => Group::Agent,
        Purpose::Shaping => Group::Shaping,
        Purpose::Lab => Group::Lab,
    };
    let options = Options {
        groups: args.purposes.iter().map(group).collect(),
        state_dir: args.state_dir,
        run_dir: args.run_dir,
        data: args.data,
        controller: args.controller.map(|text| controller_url(&text)),
    };
    let checks = doctor::examine(&options);
    let well = doctor::is_well(&checks);
    if args.json {
        println!("{}", serde_json::json!({ "ok": well, "checks": checks }));
    } else {
        print!("{}", doctor::text(&checks));
    }
    if !well {
        let missing = checks.iter().filter(|check| check.state == State::Missing).map(|check| check.name);
        anyhow::bail!("missing here: {}", missing.collect::<Vec<_>>().join(", "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::controller_url;

    #[test]
    fn a_controller_may_be_named_without_its_scheme_and_port() {
        for (given, url) in [
            ("http://ctl:8080", "http://ctl:8080"),
            ("ctl", "http://ctl:7070"),
            ("10.0.0.1:80", "http://10.0.0.1:80"),
            ("[fd00::1]", "http://[fd00::1]:7070"),
            ("[fd00::1]:80", "http://[fd00::1]:80"),
        ] {
            assert_eq!(controller_url(given), url);
        }
    }
}
