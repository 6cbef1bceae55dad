"""Write a table of generated messages to a shop, with eight columns of labels: 1,000 rows to train
on in tickets.csv, 3% of whose labels are wrong, and 400 in new.csv, whose phrases are other ones.

    python benchmarks/tickets.py tickets.csv new.csv
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path


ROWS = (1000, 400)
WRONG = 0.03
# Of each column: the classes with their phrases. The last two of each are for new messages.
COLUMNS = {
    "topic": {
        "billing": "you charged me twice|the invoice is wrong|I see a fee that I do not know|"
        "my card was debited again|the amount on the bill is too high|I was billed too much",
        "delivery": "the parcel is late|it never arrived|the driver did not come|"
        "it was left at another address|I am still waiting for the package|"
        "the shipment got lost",
        "technical": "it does not start|the screen stays black|it shuts down by itself|"
        "the update fails|it crashes all the time|it will not turn on",
        "account": "I cannot log in|my password is not accepted|I want to change my email|"
        "my profile is locked|the sign-in page rejects me|I forgot my user name",
    },
    "product": {
        "camera": "this is about my camera|I mean the camera|it is a compact camera|"
        "the thing is a camera|I own one of your digital cameras|it is the one with the zoom lens",
        "phone": "this is about my phone|I mean the phone|it is a mobile phone|"
        "the thing is a phone|I own one of your smartphones|it is the one with the SIM card",
        "laptop": "this is about my laptop|I mean the laptop|it is a small laptop|"
        "the thing is a laptop|I own one of your notebooks|it is the one with the keyboard",
        "printer": "this is about my printer|I mean the printer|it is a laser printer|"
        "the thing is a printer|I own one of your inkjets|it is the one with the toner",
    },
    "mood": {
        "angry": "this is a disgrace|I am furious|what a terrible service|I have had enough|"
        "this is outrageous|I am really annoyed",
        "neutral": "I am writing to let you know|please take note|for your information|"
        "here is my request|I would like to report this|this is for your records",
        "happy": "apart from that I love it|you are great|I am very pleased with you|"
        "your team is wonderful|I am delighted with the rest|thanks for the lovely help",
    },
    "urgency": {
        "today": "I need an answer today|it must be solved at once|this cannot wait|"
        "please hurry|I need it right now|it is an emergency",
        "soon": "an answer this week would be good|please reply in some days|"
        "I would like to hear from you soon|within the week, please|"
        "let me know before the weekend|in a couple of days is fine",
        "whenever": "there is no hurry|take your time|answer when you can|it is not urgent|"
        "no rush at all|whenever it suits you",
    },
    "wish": {
        "refund": "I want my money back|please refund me|pay it back|I ask for a refund|"
        "return the amount to my account|reimburse me",
        "repair": "please repair it|I want it to be fixed|can a technician look at it|"
        "mend it|get it working again|I would like a mechanic to see it",
        "replacement": "send me a new one|I want another one|please exchange it|"
        "I ask for a replacement|swap it for one that works|give me a different unit",
        "information": "tell me what happened|explain it to me|I want to know the reason|"
        "please give me details|what is going on|let me understand why",
    },
    "customer": {
        "new": "this was my first order|I am new here|I never bought from you before|"
        "I registered last week|it is my first time with you|I have only just joined",
        "regular": "I have been a customer for years|I order from you every month|"
        "as you know me well|this is my tenth order|I often buy from you|"
        "I am a loyal client",
    },
    "channel": {
        "shop": "I bought it in your shop|your clerk sold it to me|I was at the store|"
        "I paid at the counter|I got it at your branch|the salesman handed it to me",
        "web": "I ordered it online|I bought it on your website|it is from your web shop|"
        "I clicked on buy|I got it over the internet|I placed the order in the app",
    },
    "answer_by": {
        "phone": "call me|please ring me up|I am best reached by phone|give me a call|"
        "dial my number|talk to me on the telephone",
        "email": "write me an email|answer by mail|send me a message|please write back|"
        "reply to my inbox|drop me a line",
    },
}


def make_rows(count: int, are_new: bool) -> list[dict[str, str]]:
    """Return messages, each of a phrase for every column in a random order, with their labels."""
    chance = random.Random(count)
    rows = []
    for _ in range(count):
        row, phrases = {"message": ""}, []
        for column, classes in COLUMNS.items():
            row[column] = chance.choice([*classes])
            choices = classes[row[column]].split("|")
            phrases.append(chance.choice(choices[-2:] if are_new else choices[:-2]))
            if not are_new and chance.random() < WRONG:
                row[column] = chance.choice([name for name in classes if name != row[column]])
        chance.shuffle(phrases)
        row["message"] = ". ".join(phrase[0].upper() + phrase[1:] for phrase in phrases) + "."
        rows.append(row)
    return rows


def main() -> None:
    for name, count, are_new in zip(sys.argv[1:], ROWS, (False, True), strict=True):
        rows = make_rows(count, are_new)
        with Path(name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
