//! Charts of a summary and of a cell as SVG.

use crate::adaptive::Switch;
use crate::baselines::{Line, Record};
use crate::fixed::DENSE;
use crate::summary::{Group, Method};
use std::fmt::Write;

const WIDTH: f64 = 900.0;
/// Space for names at the left, and for what is left over at the right.
const LEFT: f64 = 190.0;
const RIGHT: f64 = 40.0;
const TOP: f64 = 70.0;
const ROW: f64 = 15.0;
/// Of a chart of lines, without its margins.
const HEIGHT: f64 = 360.0;

fn colour(who: Method) -> &'static str {
    match who {
        Method::Flexcomm => "#c0392b",
        Method::Oracle => "#27803b",
        Method::Random => "#8e8e8e",
        Method::BestAverageFixed => "#2c5fa8",
        Method::RecordedPlanner => "#b8860b",
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A chart under construction.
struct Svg {
    text: String,
}

impl Svg {
    fn new(title: &str, height: f64) -> Self {
        let text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        let mut svg = Self { text };
        svg.label(16.0, 24.0, "start", "black", title);
        svg
    }

    fn element(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing into a string does not fail.
        let _ = writeln!(self.text, "{element}");
    }

    fn label(&mut self, x: f64, y: f64, anchor: &str, colour: &str, text: &str) {
        let text = escape(text);
        self.element(format_args!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{text}</text>"
        ));
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, width: f64) {
        let ((x1, y1), (x2, y2)) = (from, to);
        self.element(format_args!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" stroke-width=\"{width}\"/>"
        ));
    }

    fn legend<'a>(&mut self, names: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let mut x = LEFT;
        for (name, colour) in names {
            self.line((x, 42.0), (x + 18.0, 42.0), colour, 3.0);
            self.label(x + 23.0, 46.0, "start", "black", name);
            x += 44.0 + 6.6 * name.chars().count() as f64;
        }
    }

    fn end(mut self) -> String {
        self.text.push_str("</svg>\n");
        self.text
    }
}

/// Values to pixels: from the least to the largest.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
    logarithmic: bool,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64> + Clone, from: f64, to: f64, logarithmic: bool) -> Self {
        let values = values.filter(|value| value.is_finite() && (!logarithmic || *value > 0.0));
        let (low, high) = (values.clone().fold(f64::INFINITY, f64::min), values.fold(f64::NEG_INFINITY, f64::max));
        let (low, high) = if low < high { (low, high) } else { (0.5, 2.0) };
        Self { low, high, from, to, logarithmic }
    }

    fn at(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.logarithmic { value.max(1e-12).ln() } else { value };
        let share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low));
        self.from + (self.to - self.from) * share.clamp(0.0, 1.0)
    }

    /// Round numbers in between.
    fn ticks(&self) -> Vec<f64> {
        let times = |steps: &[f64]| -> Vec<f64> {
            let tick = |power, step: &f64| format!("{step}e{power}").parse().unwrap_or(f64::NAN);
            (-6..9).flat_map(|power| steps.iter().map(move |step| tick(power, step))).collect()
        };
        let decades = times(&[1.0, 2.0, 5.0]);
        if self.logarithmic {
            let within = |ticks: Vec<f64>| -> Vec<f64> {
                ticks.into_iter().filter(|tick| (self.low..=self.high).contains(tick)).collect()
            };
            let coarse = within(decades);
            let fine = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
            return if coarse.len() < 3 { within(times(&fine)) } else { coarse };
        }
        let span = self.high - self.low;
        let step = decades.into_iter().find(|step| span / step <= 8.0).unwrap_or(span);
        let first = (self.low / step).ceil() as i64;
        (first..first + 9).map(|n| n as f64 * step).filter(|tick| *tick <= self.high).collect()
    }
}

/// Seconds to the target over those of the best fixed setting, by group, with intervals.
pub fn groups(title: &str, groups: &[Group]) -> String {
    let rows: usize = groups.iter().map(|group| group.compared.len() + 1).sum();
    let bottom = TOP + ROW * rows as f64;
    let mut svg = Svg::new(title, bottom + 50.0);
    let all = || groups.iter().flat_map(|group| &group.compared);
    let values = all().flat_map(|c| [c.interval.low, c.interval.high, c.geomean, 0.9, 1.1]);
    let axis = Axis::of(values, LEFT, WIDTH - RIGHT, true);
    svg.legend(Method::ALL.into_iter().filter(|who| all().any(|c| c.who == *who)).map(|who| (who.name(), colour(who))));
    for tick in axis.ticks() {
        let (x, dark) = (axis.at(tick), if tick == 1.0 { "#555" } else { "#ddd" });
        svg.line((x, TOP - 10.0), (x, bottom), dark, 1.0);
        svg.label(x, bottom + 16.0, "middle", "black", &tick.to_string());
    }
    svg.label(
        (LEFT + WIDTH - RIGHT) / 2.0,
        bottom + 36.0,
        "middle",
        "black",
        "seconds to the target / the best fixed setting's",
    );
    let mut y = TOP;
    for group in groups {
        let middle = y + ROW * (group.compared.len() as f64 - 1.0) / 2.0 + 4.0;
        svg.label(LEFT - 12.0, middle, "end", "black", &format!("{} ({})", group.name, group.cells));
        for compared in &group.compared {
            let colour = colour(compared.who);
            svg.line((axis.at(compared.interval.low), y), (axis.at(compared.interval.high), y), colour, 2.0);
            let x = axis.at(compared.geomean);
            svg.element(format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>"));
            y += ROW;
        }
        y += ROW;
    }
    svg.end()
}

/// A cell's first seed: losses over time, flexcomm's switches, and where the network changes.
pub fn timeline(record: &Record) -> String {
    let baselines = &record.baselines;
    let seed = record.seeds.first();
    let flexcomm = record.flexcomm.iter().find(|run| Some(&run.seed) == seed);
    let oracle = baselines.oracle.iter().find(|run| Some(&run.seed) == seed);
    let best = baselines.best_fixed().filter(|best| *best != DENSE);
    let adapted = [("oracle", oracle, "#27803b"), ("flexcomm", flexcomm, "#c0392b")];
    let fixed = [(Some(DENSE), "#555555"), (best, "#2c5fa8")];
    let mut lines: Vec<(&str, &Line, &str)> =
        fixed.into_iter().filter_map(|(name, colour)| Some((name?, baselines.lines.get(name?)?, colour))).collect();
    lines.extend(adapted.into_iter().filter_map(|(name, run, colour)| Some((name, &run?.line, colour))));

    let switches: &[Switch] = flexcomm.map_or(&[], |run| &run.switches);
    let bottom = TOP + HEIGHT;
    let mut svg =
        Svg::new(&format!("{}: test loss over time, seed {}", record.name, seed.unwrap_or(&0)), bottom + 50.0);
    let times = lines.iter().flat_map(|(_, line, _)| &line.at_s).copied();
    let x = Axis::of(times.clone(), LEFT / 2.0, WIDTH - RIGHT, false);
    let y = Axis::of(lines.iter().flat_map(|(_, line, _)| &line.losses).copied(), bottom, TOP, true);
    let target = seed.and_then(|seed| baselines.measure(*seed)).map(|measure| measure.target);
    svg.legend(lines.iter().map(|(name, _, colour)| (*name, *colour)));
    for tick in x.ticks() {
        svg.label(x.at(tick), bottom + 16.0, "middle", "black", &tick.to_string());
    }
    for tick in y.ticks() {
        svg.line((x.from, y.at(tick)), (x.to, y.at(tick)), "#ddd", 1.0);
        svg.label(x.from - 8.0, y.at(tick) + 4.0, "end", "black", &tick.to_string());
    }
    svg.label(
        (x.from + x.to) / 2.0,
        bottom + 36.0,
        "middle",
        "black",
        "seconds (grey: the network changes; red marks: flexcomm switches)",
    );
    for change in record.cell.changes(x.high) {
        svg.line((x.at(change), TOP), (x.at(change), bottom), "#ccc", 1.0);
    }
    if let Some(target) = target {
        svg.line((x.from, y.at(target)), (x.to, y.at(target)), "#000", 0.7);
    }
    for (_, line, colour) in &lines {
        let points = line.at_s.iter().zip(&line.losses);
        let points: Vec<String> = points.map(|(s, loss)| format!("{:.1},{:.1}", x.at(*s), y.at(*loss))).collect();
        let points = points.join(" ");
        svg.element(format_args!(
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\"/>"
        ));
    }
    for switch in switches.iter().filter(|switch| switch.at_s <= x.high) {
        let (at, what) = (x.at(switch.at_s), escape(&switch.strategy));
        svg.element(format_args!(
            "<circle cx=\"{at:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"#c0392b\"><title>{:.0} s: {what}</title></circle>",
            bottom - 6.0,
            switch.at_s
        ));
    }
    svg.end()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::baselines::Adapted;
    use crate::summary::tests::{record, summary};

    #[test]
    fn charts_show_what_there_is() {
        let mut cell = record("a-1", "a<b", 60.0, 50.0, Some(100.0));
        let line = Line { at_s: vec![0.0, 10.0, 100.0], losses: vec![2.0, 1.0, 0.5] };
        cell.baselines.lines.insert(DENSE.into(), line.clone());
        let switch = Switch { step: 3, at_s: 20.0, version: 1, strategy: "x & y".into() };
        cell.flexcomm[0] = Adapted { line, switches: vec![switch], ..cell.flexcomm[0].clone() };
        let chart = timeline(&cell);
        assert_eq!((chart.matches("<polyline").count(), chart.matches("<title>20 s: x &amp; y").count()), (3, 1));
        let summary = summary(&[cell]);
        let chart = groups("By family", &summary.by_family);
        assert!(chart.contains("a&lt;b (1)"));
        assert_eq!(chart.matches("<circle").count(), summary.by_family[0].compared.len());
        for chart in [chart, timeline(&record("b", "b", 60.0, 50.0, None)), groups("Nothing", &[])] {
            assert!(chart.starts_with("<svg ") && chart.ends_with("</svg>\n") && !chart.contains("NaN"), "{chart}");
        }
    }
}
