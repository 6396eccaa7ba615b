"""FedEmbed's speaker preferences by one command: Tables 3 and 5, the confusion matrices of Figure 5.

    python benchmarks/fedembed/voice.py --out runs/fedembed-voice

Synthesises the speech when it is not there yet (some three minutes; what is needed: `bespoke data voice-preferences`,
and for privacy `pip install 'bespoke-fl[privacy]'`), then makes a comparison folder each for balanced and imbalanced
users, without privacy and with it (voice_gaussian.toml); every folder has its report.html. What is finished is kept, so
that the command goes on where it was stopped.
"""

from preferences import HERE, Experiment

from bespoke.cli.exit_codes import program

VOICE = Experiment("voice", "table3", privacy=HERE / "voice_gaussian.toml")

if __name__ == "__main__":
    program(lambda: VOICE.run(VOICE.arguments(__doc__)))
