# %% [markdown]
"""
# Fine-tune a classifier

Forty invented support tickets teach the model which of four teams answers a ticket. On a CPU this takes less than a minute with
the small model of the package. With a GPU (*Runtime, Change runtime type*) the notebook trains the published model instead.
"""

# %%
# Write the owner of the repository on GitHub in the place of OWNER.
# %pip install -q "neobert_hf[train] @ git+https://github.com/OWNER/neobert_hf"

# %%
import io

import pandas as pd
import torch
from transformers import pipeline

import neobert_hf
from neobert_hf.finetuning import Classifier

# %% [markdown]
"""
## The texts

Your own texts are a file with the columns `label` and `text`: upload it, and read it with `pd.read_csv("tickets.csv")`.
"""

# %%
TICKETS = """label;text
billing;I was charged twice for my order
billing;The invoice has a wrong amount
billing;Please refund the price of the lamp
billing;My card was declined
billing;Why did the yearly plan become more expensive?
billing;How do I pay with another card?
billing;Please send me a receipt for the tax office
billing;There is a payment on my bank account that I do not know
billing;I cancelled, and you still took money
billing;The discount is missing on my bill
delivery;The parcel has not arrived
delivery;The lamp came broken
delivery;When will you ship my order?
delivery;The courier left the box at a wrong address
delivery;I want to return two chairs
delivery;One part is missing in the package
delivery;Can you deliver to Switzerland?
delivery;The tracking number does not work
delivery;You sent a red lamp, I ordered a blue one
delivery;How long does shipping take?
account;I cannot log in
account;The password reset sends no email
account;Please change the address of my profile
account;Delete my account and my data
account;Who in my team may invite people?
account;My login is locked after three attempts
account;How do I change my user name?
account;Give a new colleague access
account;The code for signing in never comes
account;I have two accounts and want one
bug;The app crashes when I open a file
bug;The page stays empty
bug;An error 500 appears when I save
bug;The search does not find anything
bug;The export stops in the middle
bug;The button does nothing when I press it
bug;After the update the screen is white
bug;The program is very slow and hangs
bug;Printing shows an error message
bug;The chart shows wrong numbers
"""
table = pd.read_csv(io.StringIO(TICKETS), sep=";")
table.groupby("label").head(2)

# %% [markdown]
"""
## The training

The model reports the layers that are new: those that choose a class. The training gives them their weights. The loss is near 1.4
at first, as of guesses, and falls towards 0.
"""

# %%
source = "chandar-lab/NeoBERT" if torch.cuda.is_available() else neobert_hf.MINI_MODEL_PATH
options = {"num_train_epochs": 10, "per_device_train_batch_size": 8, "logging_strategy": "epoch", "seed": 0}
classifier = Classifier(source).fit(list(table["text"]), list(table["label"]), **options)
print(", ".join(classifier.classes_))

# %% [markdown]
"""
## How good is it?

Only texts that the model has not seen can tell. Here are eight, in other words.
"""

# %%
NEW = """label;text
billing;My credit card shows 49 euros too much this month.
billing;Could you correct the company name on the last invoice?
delivery;The shipment says delivered, but nothing is here.
delivery;A table leg is scratched, can I get a new one?
account;Someone else has logged in with my name.
account;How can I change my email address?
bug;The window closes by itself after some seconds.
bug;The report counts every sale twice.
"""
new = pd.read_csv(io.StringIO(NEW), sep=";")
new["predicted"] = classifier.predict(list(new["text"]))
new["probability"] = classifier.predict_proba(list(new["text"])).max(1)
print(f"{(new['label'] == new['predicted']).sum()} of {len(new)} are right")
new.round({"probability": 2})

# %% [markdown]
"""
## Save

The folder contains the code of the model. Where neobert_hf is not installed, `trust_remote_code=True` opens it.
"""

# %%
classifier.save("runs/tickets", overwrite=True)  # the cell may run twice
classify = pipeline("text-classification", "runs/tickets")
classify("The app closes when I press save.")
