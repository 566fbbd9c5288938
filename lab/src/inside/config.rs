//! The configuration files that the lab writes for controller and agents.

use std::path::Path;

use crate::plan::{CONTROLLER_PORT, node_addr, node_name};

/// Probing in the lab, where a phase holds for less than a minute and not for hours. Rates are scaled down, so throughput tests need
/// fewer bytes and a larger share to be as frequent: a test that a saturated link of 4 Mbit/s lets fail is charged whole seconds.
const SETTINGS: &str = "
[probes]
budget_share = 0.2
min_bytes = 131072
retest_s = 10
";

/// How that differs from the defaults, said before anybody believes the lab's pace.
pub const LAB_SETTINGS: &str = "the lab measures links more often than by default, since a phase of its trace lasts a minute and its links are thin: probes \
    may take 20 % of a link (default 1 %), and a pair is tested again after 10 s (default 20 s); all in lab/src/inside/config.rs";

/// The controller's: open to the emulated network, scenario control on.
pub(crate) fn controller(token_file: &Path) -> String {
    format!(
        "listen = \"0.0.0.0:{CONTROLLER_PORT}\"\ndb = \"/run/flexlab/controller.db\"\ntoken_file = {token_file:?}\n\
         scenario = true\n{SETTINGS}"
    )
}

/// Node `i`'s agent: may shape its one link.
pub(crate) fn agent(i: usize, controller: &str, run: &str, token_file: &Path) -> String {
    let name = node_name(i);
    let addr = node_addr(i);
    format!(
        "node = {name:?}\ncontroller = {controller:?}\ntoken_file = {token_file:?}\nlisten = \"{addr}\"\n\
         run_dir = \"{run}/{name}\"\nstate_dir = \"{run}/{name}/state\"\nprobe_share = 0.2\nlog = \"info\"\n\n[shaping]\nallow = true\ninterfaces = [\"eth0\"]\n"
    )
}
