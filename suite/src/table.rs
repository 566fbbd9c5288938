//! The summary as a table, for a terminal.

use crate::adaptive::Experiments;
use crate::fixed;
use crate::score::Interval;
use crate::summary::{Accuracy, Cause, CellRow, Method, Over, Problems, RatioStats, Reaction, Spread, Summary};
use std::fmt::Write;

/// What no cell shows, whatever its numbers.
const LEFT_OUT: &str = "\
Not in the truth: packets one by one and congestion control other than windows that double, halve and time out; several switches \
or routes (ports of NICs are the only bottlenecks), so traceroutes find nothing; echoes that are lost; NCCL's and GPU's own behaviour; \
cores and memory that computing, compression, agents and controller compete for: agents and passes of the controller take no time; \
of trials the time of copies that they take and put back; of AR-Topk's shadows their time and the samples of gradients that ranks \
send for them; handshakes of HTTP and TLS; what a controller keeps from earlier jobs: what it believes of collectives and compressors \
begins anew in every run; compressors that the truth's table does not have, which flexcomm is not offered; ranks that come, go or are \
slower for good; clocks that drift; models of more than a few layers, whose gradients these stand for by a factor, with which all \
grows that is not fixed: PowerSGD's factors too, which would grow with the root of it, and the one value of a bucket that top-k keeps \
at least.";

impl Summary {
    /// For a terminal.
    pub fn table(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = self.write(&mut text);
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let cells: usize = self.by_family.iter().map(|group| group.cells).sum();
        let runs = self.cells.iter().filter(|row| row.setting == "flexcomm").count();
        let frozen = if self.frozen { "as frozen" } else { "NOT the frozen ones: compare with no other result" };
        writeln!(
            out,
            "\n{cells} cells, {runs} runs of flexcomm by the program {}; cells and truth are {frozen} (digest {})",
            self.binary, self.digest
        )?;
        if !self.incomplete.is_empty() {
            writeln!(out, "NOT WHOLE, and left out: {}", self.incomplete.join(", "))?;
        }
        if !self.failed.is_empty() {
            writeln!(out, "FAILED, and counted as three budgets: {}", self.failed.join(", "))?;
        }
        writeln!(
            out,
            "\nSeconds to the target, over those of ... (below 1 is faster; 95 % intervals; p95 and worst of cells)\n"
        )?;
        writeln!(out, "{:20}{:^36}{:^36}{:^22}", "", "each cell's best fixed setting", "dense", "the oracle")?;
        let titles = |oracle: bool| if oracle { "  mean  interval" } else { "  mean  interval       p95  worst   " };
        writeln!(out, "{:20}{:36}{:36}{:22}", "", titles(false), titles(false), titles(true))?;
        for who in Method::ALL {
            let long = |over| match self.of(who, over) {
                Some(c) => format!("{:>6.2}  {}  {:>6.2} {:>6.2}", c.geomean, interval(&c.interval), c.p95, c.worst),
                None => String::new(),
            };
            let short = |c: &RatioStats| format!("{:>6.2}  {}", c.geomean, interval(&c.interval));
            let oracle = self.of(who, Over::Oracle).map_or(String::new(), short);
            if self.of(who, Over::Dense).is_some() {
                writeln!(out, "{:20}{:36}{:36}{oracle}", who.name(), long(Over::BestFixed), long(Over::Dense))?;
            }
        }
        if let Some(best) = &self.best_average_fixed {
            writeln!(out, "\nThe best average fixed setting is {best}.")?;
        }
        writeln!(out, "\nFlexcomm over each fixed setting")?;
        for (setting, ratio) in &self.geomean_vs_fixed {
            writeln!(out, "  {setting:<44}{ratio:>6.2}")?;
        }
        self.write_groups(out)?;
        self.write_cells(out)?;
        self.write_flexcomm(out)?;
        writeln!(out, "\n{}", wrapped(LEFT_OUT))
    }

    fn write_groups(&self, out: &mut String) -> std::fmt::Result {
        let shown: Vec<Method> =
            Method::ALL.into_iter().filter(|who| self.of(*who, Over::BestFixed).is_some()).collect();
        let titles = [
            ("family", &self.by_family),
            ("length of phases", &self.by_phase),
            ("communication ratio", &self.by_ratio),
        ];
        for (title, groups) in titles {
            write!(out, "\n{:<37}cells", format!("/ best fixed, by {title}"))?;
            writeln!(out, "{}", shown.iter().map(|who| format!("  {:<19}", who.name())).collect::<String>())?;
            for group in groups {
                let of = |who: &Method| {
                    let found = group.compared.iter().find(|compared| compared.who == *who);
                    found.map_or(" ".repeat(21), |c| format!("{:>6.2} {}", c.geomean, interval(&c.interval)))
                };
                writeln!(out, "  {:<35}{:>5}{}", group.name, group.cells, shown.iter().map(of).collect::<String>())?;
            }
        }
        Ok(())
    }

    fn write_cells(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "\nFlexcomm in each cell, with the 95 % intervals of its seeds, and beside it the random control and the recorded planner \
             (short:\nwithout +ef(vanilla), /allgather and /dense-ring)\n"
        )?;
        writeln!(
            out,
            "{:<15}{:>2}  {:<19}{:>6} {:>5}  {:<27}{:^20} {:>6} {:>7} {:>7} {:>7}  loses by",
            "cell",
            "N",
            "model, momentum",
            "phases",
            "ratio",
            "best fixed setting",
            "/ best fixed",
            "/dense",
            "/oracle",
            "random",
            "planner"
        )?;
        for row in &self.by_cell {
            let ratio = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
            let model = format!("{:?} {}", row.model, row.momentum).to_lowercase();
            let interval = row.interval.as_ref().map_or(" ".repeat(12) + "- ", interval);
            let why = row.cause.map_or("", Cause::text);
            let why = if row.errors > 0 { format!("{} failed", row.errors) } else { why.to_owned() };
            writeln!(
                out,
                "{:<15}{:>2}  {model:<19}{:>4} s {:>5.2}  {:<27}{:>6.2}{interval} {:>6} {:>7} {:>7} {:>7}  {why}",
                row.cell,
                row.world,
                row.phase_s,
                row.communication_ratio,
                row.best_fixed.as_deref().map_or("-".to_owned(), short),
                row.ratio,
                ratio(row.over_dense),
                ratio(row.over_oracle),
                ratio(row.random),
                ratio(row.recorded_planner),
            )?;
        }
        if let Some(CellRow { cell, ratio, .. }) = self.worst_of(60.0) {
            writeln!(
                out,
                "\nThe worst over its best fixed setting, of cells with phases of 60 s and more: {ratio:.2} ({cell})"
            )?;
        }
        Ok(())
    }

    fn write_flexcomm(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "\nWhere flexcomm loses most against the best fixed setting, and what most of the time over the oracle's is"
        )?;
        for CellRow { cell, ratio, cause, share, errors, .. } in self.worst() {
            let why = cause.zip(*share).map(|(cause, share)| format!("{} ({:.0} %)", cause.text(), 100.0 * share));
            let why = if *errors > 0 { Some(format!("{errors} runs ended with an error")) } else { why };
            writeln!(out, "  {cell:<20}{ratio:>6.2}  {}", why.unwrap_or_default())?;
        }
        let number =
            |value: Option<f64>, factor: f64| value.map_or("-".into(), |value| format!("{:.1}", factor * value));
        let percent = |spread: Spread| {
            format!("{} % at the median, {} % at p95", number(spread.median, 100.0), number(spread.p95, 100.0))
        };
        let Experiments { seconds, shadow_seconds, bytes, cpu_seconds } = self.experiments.mean;
        let gigabytes = bytes / 1e9;
        writeln!(out, "\nFlexcomm's runs")?;
        writeln!(out, "  live trials, of time to target   {}", percent(self.experiments.share_of_time))?;
        writeln!(
            out,
            "  experiments in the mean of runs  {seconds:.1} s and {shadow_seconds:.1} s of shadow trials, {gigabytes:.2} GB, \
             {cpu_seconds:.1} s of cores"
        )?;
        let Reaction { seconds, share_of_phase, .. } = self.reaction;
        let (median, p95) = (number(seconds.median, 1.0), number(seconds.p95, 1.0));
        writeln!(out, "  from a change to a better one    {median} s at the median, {p95} s at p95")?;
        writeln!(out, "  the same, of a phase's length    {}", percent(share_of_phase))?;
        for (title, reaction) in
            [("changes of the network", self.reaction), ("the same, the oracle", self.reaction_of_oracle)]
        {
            let Reaction { made, missed, unneeded, .. } = reaction;
            writeln!(out, "  {title:<33}{made} answered, {missed} not answered, {unneeded} asked for nothing")?;
        }
        writeln!(out, "  predicted t_sync is wrong by     {}", percent(self.prediction_error))?;
        for Accuracy { who, median, worst, below, runs } in &self.accuracy_over_dense {
            let title = match who {
                Method::Flexcomm => "final accuracy over dense's".to_owned(),
                control => format!("the same, {}", control.name()),
            };
            let (median, worst) = (100.0 * median, 100.0 * worst);
            writeln!(
                out,
                "  {title:<33}{median:+.2} points at the median, {worst:+.2} at worst, {below} of {runs} runs below -0.5"
            )?;
        }
        let Problems { count, runs, first } = &self.problems;
        let example = first.as_ref().map_or(String::new(), |first| {
            format!(" in {runs} runs; the first: {}", first.chars().take(70).collect::<String>())
        });
        writeln!(out, "  refused requests and orders      {count}{example}")?;
        writeln!(
            out,
            "  target not reached               {} runs, {} of them with an error",
            self.unreached, self.errors
        )
    }
}

fn interval(interval: &Interval) -> String {
    // A single value has none.
    if interval.low == interval.high {
        format!("{:>13} ", "-")
    } else {
        format!("{:>5.2} -{:>6.2} ", interval.low, interval.high)
    }
}

/// A fixed setting, without what most of them share.
fn short(setting: &str) -> String {
    let label = fixed::label(setting).replace("+ef(vanilla)", "");
    let ends = ["/allgather", "/dense-ring"].into_iter().find_map(|end| label.strip_suffix(end));
    ends.unwrap_or(&label).to_owned()
}

/// In lines of a terminal.
fn wrapped(text: &str) -> String {
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split_whitespace() {
        if let Some(line) = lines.last_mut().filter(|line| line.len() + word.len() < 110) {
            let space = if line.is_empty() { "" } else { " " };
            line.push_str(space);
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join("\n")
}
